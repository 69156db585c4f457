//! Cost of a hand-over, of planning, and how well window streaming hides behind compute.
#![expect(clippy::unwrap_used, reason = "a benchmark fails by panicking")]
#![expect(clippy::print_stdout, reason = "a benchmark prints")]
#![expect(clippy::cast_precision_loss, reason = "ratios to three digits")]

use std::sync::Arc;
use std::time::Duration;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use headrace_core::{HostPage, KvPiece, KvPlane, KvShape, LayerKind, PlanKind, Planes, StateShape};
use headrace_device::{
    CopyMemory, CopyQueue, CpuDevice, HostMemory, LoadJob, QueueConfig, WindowJob, monotonic_ns,
};

const TOKENS: u32 = 64;
/// 100,000 tokens.
const PAGES: u32 = 1563;

struct Model {
    memory: Arc<CopyMemory>,
}

impl Model {
    /// `rows`: bytes per token of each plane. Untouched pages cost no memory.
    fn new(layers: u32, pages: u32, rows: &[u64]) -> Self {
        let shape = KvShape {
            layers,
            pages,
            page_tokens: TOKENS,
            host_pages: pages,
            host_page_tokens: TOKENS,
        };
        let plane = |(index, &token_bytes): (usize, &u64)| KvPlane {
            name: format!("plane {index}"),
            token_bytes,
            page_stride: u64::from(TOKENS) * token_bytes,
            layer_stride: u64::from(pages * TOKENS) * token_bytes,
        };
        let kv_planes = rows.iter().enumerate().map(plane).collect();
        let kinds = (0..layers).map(LayerKind::Kv).collect();
        let planes = Planes::new(shape, kv_planes, StateShape::default(), vec![], kinds).unwrap();
        let side = || {
            let bytes = (0..planes.len()).map(|plane| planes.extent(plane).0);
            let region = |bytes| HostMemory::new(bytes).unwrap().region();
            bytes.map(region).collect::<Vec<_>>()
        };
        let (device, host) = (side(), side());
        let memory = Arc::new(CopyMemory::new(planes, device, host).unwrap());
        Self { memory }
    }

    fn queue(&self, bandwidth: Option<u64>) -> CopyQueue {
        let config = QueueConfig {
            deadline: Duration::from_secs(30),
            max_jobs: 64,
            copy_check: false,
            on_done: Box::new(|_, _| ()),
        };
        let device = Arc::new(CpuDevice::new(bandwidth).unwrap());
        CopyQueue::new(device, self.memory.clone(), config).unwrap()
    }
}

/// `pages` pages, scattered on both sides: no two of them merge.
fn scattered(pages: u32) -> Vec<KvPiece> {
    let piece = |index: u32| KvPiece {
        device_page: index * 700 % pages,
        device_token: 0,
        host_page: HostPage(index * 1009 % pages),
        tokens: TOKENS,
    };
    (0..pages).map(piece).collect()
}

/// The engine's side of `start_step` for 64 layers x 100,000 tokens; the goal is 1 ms.
fn hand_over(c: &mut Criterion) {
    let model = Model::new(64, PAGES, &[4, 4, 1, 1]);
    let queue = model.queue(None);
    let pieces = scattered(PAGES);
    c.bench_function("start_step, 64 layers x 100K tokens", |b| {
        let fresh = || {
            queue.drain(Duration::from_secs(30)).unwrap();
            vec![LoadJob {
                job: 0,
                kv: pieces.clone(),
                state: Vec::new(),
            }]
        };
        let start = |loads| queue.start_step(loads, None).unwrap();
        b.iter_batched(fresh, start, BatchSize::PerIteration);
    });
    c.bench_function("plan, 100K tokens, 4 planes", |b| {
        let planes = model.memory.planes();
        let fresh = || pieces.clone().into_boxed_slice();
        let plan = |pieces| planes.plan(PlanKind::Load, pieces, [].into()).unwrap();
        b.iter_batched(fresh, plan, BatchSize::PerIteration);
    });
}

const LAYERS: u32 = 12;
const ROW: u64 = 1024;
const WINDOW_PAGES: u32 = 64;

/// One forward over a window with a compute of `compute_ns` a layer; its time in nanoseconds.
fn stream(queue: &CopyQueue, turn: u64, compute_ns: u64) -> u64 {
    let piece = |page: u32| KvPiece {
        device_page: page,
        device_token: 0,
        host_page: HostPage(page),
        tokens: TOKENS,
    };
    let window = WindowJob {
        job: turn,
        pieces: (0..WINDOW_PAGES).map(piece).collect(),
        k0: turn * u64::from(LAYERS),
        width: 2,
    };
    let start_ns = monotonic_ns();
    let step = queue.start_step(Vec::new(), Some(window)).unwrap();
    for layer in 0..LAYERS as usize {
        step.before_layer(layer).unwrap();
        let end_ns = monotonic_ns() + compute_ns;
        let left = || Duration::from_nanos(end_ns.saturating_sub(monotonic_ns()));
        while !left().is_zero() {
            std::thread::park_timeout(left());
        }
        step.after_layer(layer).unwrap();
    }
    let total_ns = monotonic_ns() - start_ns;
    assert!(step.finish().unwrap().is_empty());
    total_ns
}

/// Time of a forward against load + layers x max(load, compute), the goal being 10 % of it.
fn window_streaming(_: &mut Criterion) {
    let load_ns = 20_000_000;
    let layer_bytes = u64::from(WINDOW_PAGES * TOKENS) * ROW;
    let bandwidth = layer_bytes * 1_000_000_000 / load_ns;
    let model = Model::new(LAYERS, WINDOW_PAGES, &[ROW]);
    let queue = model.queue(Some(bandwidth));
    println!("window streaming, {LAYERS} layers, width 2, load 20 ms a layer:");
    let mut turns = 0..;
    for quarters in [1, 2, 3, 4, 6, 8, 16] {
        let compute_ns = load_ns * quarters / 4;
        let bound_ns = load_ns + u64::from(LAYERS) * load_ns.max(compute_ns);
        let mut times = [0; 3].map(|_| stream(&queue, turns.next().unwrap(), compute_ns));
        times.sort_unstable();
        let ratio = times[1] as f64 / bound_ns as f64;
        println!(
            "  compute/load {:.2}: {:.1} ms, bound {:.1} ms, ratio {ratio:.3}{}",
            quarters as f64 / 4.0,
            times[1] as f64 / 1e6,
            bound_ns as f64 / 1e6,
            if ratio <= 1.1 { "" } else { "  ABOVE 1.1" },
        );
    }
    let stats = queue.stats();
    let rate = stats.window.bytes as f64 / stats.window.busy_ns as f64;
    println!(
        "  link {:.3} GB/s, cap {:.3} GB/s",
        rate,
        bandwidth as f64 / 1e9
    );
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(2))
        .sample_size(20);
    targets = hand_over, window_streaming
}
criterion_main!(benches);
