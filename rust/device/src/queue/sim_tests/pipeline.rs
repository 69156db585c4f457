//! Times of streaming on the virtual clock, against the recurrence that defines them.

use std::sync::Arc;

use headrace_core::{HostPage, KvPiece, KvPlane, KvShape, LayerKind, Planes, StateShape};
use proptest::prelude::*;

use super::super::*;
use crate::queue::job::{LoadJob, WindowJob};
use crate::regions::{CopyMemory, Region};
use crate::sim::{CELL, Kernel, Read, SimDevice, Write};

const DEVICE: u64 = 1 << 40;
const HOST: u64 = 1 << 41;

/// A model of one plane, one host page and one LOW page of `layers` layers.
struct Pipeline {
    sim: Arc<SimDevice>,
    queue: CopyQueue,
    machine: machine::Machine,
    layers: u32,
    width: u32,
}

impl Pipeline {
    /// `load_ns[k]` and `compute_ns[k]` by running index.
    fn new(layers: u32, width: u32, load_ns: Vec<u64>) -> Self {
        let shape = KvShape {
            layers,
            pages: 1,
            page_tokens: 1,
            host_pages: 1,
            host_page_tokens: 1,
        };
        let plane = KvPlane {
            name: "k".to_owned(),
            token_bytes: CELL,
            layer_stride: CELL,
            page_stride: CELL,
        };
        let kinds = (0..layers).map(LayerKind::Kv).collect();
        let planes = Planes::new(shape, vec![plane], StateShape::default(), vec![], kinds);
        let bytes = u64::from(layers) * CELL;
        let region = |at| vec![Region::virtual_at(at, bytes)];
        let memory = CopyMemory::new(planes.unwrap(), region(DEVICE), region(HOST)).unwrap();
        let sim = Arc::new(SimDevice::new(Box::new(move |copy| {
            load_ns[usize::try_from(copy.k).unwrap()]
        })));
        for layer in 0..u64::from(layers) {
            sim.preset(Write {
                address: HOST + layer * CELL,
                bytes: CELL,
                version: 1 + layer,
            });
        }
        let config = QueueConfig {
            deadline: Duration::from_hours(1),
            max_jobs: 8,
            copy_check: false,
            on_done: Box::new(|_, outcome| assert_eq!(outcome, CopyOutcome::Done)),
        };
        let memory = Arc::new(memory);
        let made = CopyQueue::without_worker(sim.clone(), memory, config, Edges::default());
        let (queue, machine) = made.unwrap();
        Self {
            sim,
            queue,
            machine,
            layers,
            width,
        }
    }

    /// The worker is as fast as the clock is still.
    fn work(&mut self) {
        loop {
            let command = self.queue.shared.desk.next(Duration::ZERO);
            let accepted = command
                .map(|command| self.machine.accept(command))
                .is_some();
            let advanced = self.machine.advance(0);
            self.machine.deliver();
            if !accepted && !advanced {
                return;
            }
        }
    }

    /// One step: the host enqueues as far as the gates let it, then time goes on.
    fn forward(&mut self, step: u32, compute_ns: &[u64]) {
        let k0 = u64::from(step * self.layers);
        let window = WindowJob {
            job: k0,
            pieces: vec![piece()],
            k0,
            width: self.width,
        };
        let handle = self.queue.start_step(Vec::new(), Some(window)).unwrap();
        for layer in 0..self.layers {
            loop {
                self.work();
                if handle
                    .before_layer_for(layer as usize, Duration::ZERO)
                    .unwrap()
                {
                    break;
                }
                assert!(self.sim.tick(), "layer {layer} stalls");
            }
            let k = k0 + u64::from(layer);
            self.sim.launch(Kernel {
                name: format!("attention {k}"),
                reads: vec![Read {
                    address: DEVICE + k % u64::from(self.width) * CELL,
                    bytes: CELL,
                    version: 1 + u64::from(layer),
                    job: None,
                }],
                cost_ns: compute_ns[usize::try_from(k).unwrap()],
                ..Kernel::default()
            });
            handle.after_layer(layer as usize).unwrap();
        }
    }

    fn makespan(mut self, steps: u32, compute_ns: &[u64]) -> u64 {
        for step in 0..steps {
            self.forward(step, compute_ns);
        }
        loop {
            self.work();
            if !self.sim.tick() {
                break;
            }
        }
        assert_eq!(self.sim.violations(), Vec::<String>::new());
        assert_eq!(self.queue.drain_for(Duration::ZERO), None);
        self.sim.clock_ns()
    }
}

fn piece() -> KvPiece {
    KvPiece {
        device_page: 0,
        device_token: 0,
        host_page: HostPage(0),
        tokens: 1,
    }
}

fn makespan(layers: u32, width: u32, steps: u32, load_ns: &[u64], compute_ns: &[u64]) -> u64 {
    Pipeline::new(layers, width, load_ns.to_vec()).makespan(steps, compute_ns)
}

/// load(k) starts when load(k-1) and compute(k-width) have ended, compute(k) when compute(k-1) and
/// load(k) have.
fn by_definition(width: u32, load_ns: &[u64], compute_ns: &[u64]) -> u64 {
    let (mut loads, mut computes): (Vec<u64>, Vec<u64>) = (Vec::new(), Vec::new());
    for (k, (load, compute)) in load_ns.iter().zip(compute_ns).enumerate() {
        let free = k
            .checked_sub(width as usize)
            .map_or(0, |before| computes[before]);
        let load_end = loads.last().copied().unwrap_or(0).max(free) + load;
        let compute_end = computes.last().copied().unwrap_or(0).max(load_end) + compute;
        loads.push(load_end);
        computes.push(compute_end);
    }
    *computes.last().unwrap()
}

#[test]
fn constant_times_give_the_makespan_of_the_formula() {
    for (layers, width) in [(7, 2), (36, 2), (7, 3), (36, 3)] {
        let n = u64::from(layers);
        for (load, compute) in [(10, 10), (10, 3), (3, 10), (1000, 999), (999, 1000), (7, 0)] {
            let times = |t| vec![t; layers as usize];
            let wanted = if load >= compute {
                n * load + compute
            } else {
                load + n * compute
            };
            let found = makespan(layers, width, 1, &times(load), &times(compute));
            assert_eq!(
                found, wanted,
                "{layers} layers, width {width}: {load}, {compute}"
            );
        }
    }
}

#[test]
fn one_buffer_overlaps_nothing() {
    assert_eq!(makespan(5, 1, 1, &[10; 5], &[7; 5]), 5 * 17);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Over several steps, odd and even, with any times: no load is later than rule and link allow.
    #[test]
    fn any_times_give_the_makespan_of_the_definition(
        layers in 1..7u32,
        steps in 1..4u32,
        width in 1..4u32,
        times in prop::collection::vec((1..100u64, 0..100u64), 24),
        slow in prop::collection::vec(0..10u8, 24),
    ) {
        let width = width.min(layers);
        let k = (layers * steps) as usize;
        let slowed = |(at, ns): (usize, u64)| if slow[at] == 0 { ns * 10 } else { ns };
        let load: Vec<_> = times[..k].iter().map(|t| t.0).enumerate().map(slowed).collect();
        let compute: Vec<_> = times[..k].iter().map(|t| t.1).enumerate().map(slowed).collect();
        let found = makespan(layers, width, steps, &load, &compute);
        prop_assert_eq!(found, by_definition(width, &load, &compute));
    }
}

/// HST-09: what a step copies for itself goes ahead of its loads.
#[test]
fn metadata_before_the_burst_does_not_wait_for_it() {
    let layer_ns = 1000;
    let start_of_forward = |metadata_first: bool| {
        let mut pipeline = Pipeline::new(8, 2, vec![layer_ns]);
        if metadata_first {
            pipeline.sim.metadata(10);
        }
        let load = LoadJob {
            job: 0,
            kv: vec![piece()],
            state: Vec::new(),
        };
        let _step = pipeline.queue.start_step(vec![load], None).unwrap();
        pipeline.work();
        if !metadata_first {
            pipeline.sim.metadata(10);
        }
        let start = pipeline.sim.record(Stream::Compute).unwrap();
        pipeline.sim.settle();
        while !pipeline.sim.query(&start).unwrap().is_over() {
            assert!(pipeline.sim.tick());
            pipeline.sim.settle();
        }
        let started_ns = pipeline.sim.clock_ns();
        while pipeline.sim.tick() {}
        pipeline.work();
        started_ns
    };
    assert!(start_of_forward(true) < layer_ns);
    assert!(start_of_forward(false) >= layer_ns, "the order is needed");
}
