//! The device over a driver made for tests: what it enqueues, in which order, and what it keeps.
#![expect(clippy::cast_possible_truncation, reason = "test memory is small")]

mod choice;
mod copies;
mod memory;
mod order;
mod waiter;

use std::cell::RefCell;
use std::ffi::CStr;
use std::sync::mpsc::channel;

use headrace_core::{
    CopyOutcome, HostPage, KvPiece, LayerKind, PlanKind, Run, StatePiece, Thresholds,
};

use super::driver::CopyAttributes;
use super::fake::{COMPUTE, Call, Fake, INVALID_VALUE, depth};
use super::measure::{self, Sample};
use super::paths::grid;
use super::*;
use crate::queue::tests::world::{self, World};
use crate::queue::{CopyQueue, LoadJob, QueueConfig, StoreJob, WindowJob};
use crate::regions::Region;

const LONG: Duration = Duration::from_secs(20);
const ALL: [Mechanism; 3] = [Mechanism::Plain, Mechanism::Batch, Mechanism::Gather];
/// Registered in pieces as small as can be, so that runs cross them.
const SMALL_PIECES: u64 = 4096;

fn config(fake: &Fake) -> CudaConfig {
    CudaConfig {
        ordinal: fake.ordinal,
        stream: COMPUTE as u64,
        owner: Arc::new(()),
        code: b"gather\0".to_vec(),
        symbol: "copy_gather".to_owned(),
        thresholds: Some(only(Mechanism::Gather)),
        cache: None,
    }
}

/// Thresholds that choose one mechanism for every length.
fn only(how: Mechanism) -> Thresholds {
    let (plain_bytes, batch_bytes) = match how {
        Mechanism::Plain => (0, None),
        Mechanism::Batch => (u64::MAX, Some(0)),
        Mechanism::Gather => (u64::MAX, None),
    };
    Thresholds {
        plain_bytes,
        batch_bytes,
    }
}

fn device_memory(fake: &Fake, bytes: u64) -> Region {
    let memory = HostMemory::new(bytes).unwrap().region();
    let (address, owner) = (memory.address(), Arc::new(memory));
    let space = Space::Cuda(fake.ordinal);
    #[expect(unsafe_code, reason = "the fake's GPU has memory of this process")]
    // SAFETY: the owner is the region itself.
    unsafe {
        Region::from_raw(address, bytes, space, owner)
    }
}

struct Rig {
    fake: Arc<Fake>,
    device: Arc<CudaDevice>,
    world: World,
}

impl Rig {
    fn new(eager: bool) -> Self {
        Self::with(Fake::new(eager), |_| {})
    }

    fn with(fake: Arc<Fake>, change: impl FnOnce(&mut CudaConfig)) -> Self {
        Self::over(fake, true, change)
    }

    fn over(fake: Arc<Fake>, batch: bool, change: impl FnOnce(&mut CudaConfig)) -> Self {
        let mut config = config(&fake);
        change(&mut config);
        let device = CudaDevice::with_driver(Fake::driver(batch), config).unwrap();
        let memory = HostMemory::new(1 << 20).unwrap();
        let context = device.context.clone();
        let small = Registration::in_pieces(&context, &memory, SMALL_PIECES).unwrap();
        device.add(small);
        let mut used = 0;
        let host = |bytes: u64| {
            let region = memory.region().slice(used, bytes).unwrap();
            used += bytes + 3; // planes at odd addresses too
            region
        };
        let world = World::with(|bytes| device_memory(&fake, bytes), host);
        fake.take_calls();
        Self {
            fake,
            device: Arc::new(device),
            world,
        }
    }

    fn layer(&self, job: u64, kind: PlanKind, layer: usize) -> LayerCopy {
        let planes = self.world.memory.planes();
        let layer = planes.model_layers()[layer];
        let (kv, state) = (pieces(kind), states(kind));
        LayerCopy {
            job,
            memory: self.world.memory.clone(),
            plan: Arc::new(planes.plan(kind, kv.into(), state.into()).unwrap()),
            layer,
            k: 0,
            sums: None,
        }
    }

    fn load(&self, job: u64) -> LayerCopy {
        self.layer(job, PlanKind::Load, 1)
    }

    fn stream(&self, stream: Stream) -> Handle {
        self.device.lanes[stream.index()].lock().handle().unwrap()
    }

    fn progress(&self, ticket: &Ticket) -> Progress {
        self.device.query(ticket).unwrap()
    }
}

fn pieces(kind: PlanKind) -> Vec<KvPiece> {
    let piece = |device_page, host_page, tokens| KvPiece {
        device_page,
        device_token: 0,
        host_page: HostPage(host_page),
        tokens,
    };
    match kind {
        PlanKind::Window { width } => (0..2)
            .map(|start| piece(3 + start * width * world::PAGES, 8 - start, world::PAGE))
            .collect(),
        _ => vec![
            piece(3, 1, world::PAGE),
            piece(4, 2, world::PAGE),
            piece(0, 5, 3),
            piece(6, 0, 1),
        ],
    }
}

fn states(kind: PlanKind) -> Vec<StatePiece> {
    let one = StatePiece {
        device_slot: 1,
        host_slot: 2,
    };
    match kind {
        PlanKind::Window { .. } => Vec::new(),
        _ => vec![one],
    }
}

fn texts(progress: &Progress) -> Vec<(u64, String)> {
    match progress {
        Progress::Failed(faults) => faults.iter().map(|f| (f.job, f.text.clone())).collect(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn default_streams_are_refused_before_any_driver_call() {
    for stream in DEFAULT_STREAMS {
        let fake = Fake::new(true);
        let refused = CudaDevice::new(CudaConfig {
            stream,
            ..config(&fake)
        });
        assert!(matches!(
            refused,
            Err(Error::Config {
                field: "stream",
                ..
            })
        ));
        assert_eq!(fake.take_calls(), []);
    }
}

#[test]
fn a_function_that_the_driver_lacks_is_named_unless_it_is_the_batch() {
    let asked = RefCell::new(Vec::new());
    let all_but = |missing: &CStr| {
        Driver::resolve(|symbol, version| {
            asked.borrow_mut().push((symbol, version));
            (symbol != missing).then_some(std::ptr::dangling_mut())
        })
    };
    let whole = all_but(c"none").unwrap();
    assert!(whole.memcpy_batch.is_some());
    let symbols = asked.take();
    for &(symbol, version) in &symbols {
        if symbol == c"cuMemcpyBatchAsync" {
            assert_eq!(version, 13_000);
            assert!(all_but(symbol).unwrap().memcpy_batch.is_none());
            continue;
        }
        assert_eq!(version, 12_000);
        let Err(Error::Config { field, value, .. }) = all_but(symbol) else {
            panic!("{symbol:?} is not needed");
        };
        assert_eq!(field, "driver");
        assert!(symbol.to_str().is_ok_and(|name| value.ends_with(name)));
    }
    assert!(symbols.len() > 30);
}

#[test]
fn what_cannot_be_made_is_refused_by_name() {
    let fake = Fake::new(true);
    let make = |change: fn(&mut CudaConfig)| {
        let mut config = config(&fake);
        change(&mut config);
        CudaDevice::with_driver(Fake::driver(true), config).err()
    };
    let ordinal = make(|config| config.ordinal = 1 << 20);
    assert!(matches!(
        ordinal,
        Some(Error::Config {
            field: "ordinal",
            ..
        })
    ));
    let symbol = make(|config| config.symbol = "a\0b".to_owned());
    assert!(matches!(
        symbol,
        Some(Error::Config {
            field: "symbol",
            ..
        })
    ));
    let call = |error| match error {
        Some(Error::Device { call, .. }) => call,
        other => panic!("{other:?}"),
    };
    let code = call(make(|config| config.code = b"noise\0".to_vec()));
    assert_eq!(code, "cuModuleLoadData");
    let missing = call(make(|config| config.symbol = "other".to_owned()));
    assert_eq!(missing, "cuModuleGetFunction");
    assert_eq!(fake.pinned(), [], "nothing stays behind");
}

#[test]
fn every_thread_finds_the_context_current_and_leaves_what_was() {
    let rig = Rig::new(true);
    let foreign = Fake::new(true);
    let other = CudaDevice::with_driver(Fake::driver(true), config(&foreign)).unwrap();
    std::thread::scope(|scope| {
        for stream in Stream::COPY {
            let (rig, other) = (&rig, &other);
            scope.spawn(move || {
                let outer = other.context.enter().unwrap();
                let copy = rig.load(stream.index() as u64);
                rig.device.copy(stream, Mechanism::Gather, copy).unwrap();
                let ticket = rig.device.record(stream).unwrap();
                assert!(rig.device.join(&ticket, Duration::ZERO).unwrap());
                assert_eq!(rig.progress(&ticket), Progress::Done);
                assert_eq!(depth(), 1);
                drop(outer);
                assert_eq!(depth(), 0);
            });
        }
    });
    assert_eq!(depth(), 0);
}
