//! The queue with its worker over the CPU device.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a helper of a test fails by panicking, as a test does"
)]

pub(crate) mod world;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use headrace_core::{CopyOutcome, Error, HostPage, KvPiece, StatePiece};

use super::*;
use crate::cpu::{CpuDevice, Injection};
use world::World;

const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(200);

fn failed(outcome: &CopyOutcome) -> &headrace_core::CopyFailure {
    match outcome {
        CopyOutcome::Failed(failure) => failure,
        other => panic!("{other:?}"),
    }
}

fn piece(device_page: u32, host_page: u32, tokens: u32) -> KvPiece {
    KvPiece {
        device_page,
        device_token: 0,
        host_page: HostPage(host_page),
        tokens,
    }
}

fn load(job: u64, pages: &[(u32, u32)]) -> LoadJob {
    LoadJob {
        job,
        kv: pages
            .iter()
            .map(|&(d, h)| piece(d, h, world::PAGE))
            .collect(),
        state: Vec::new(),
    }
}

struct Bench {
    world: World,
    device: Arc<CpuDevice>,
    queue: CopyQueue,
    outcomes: Receiver<(u64, CopyOutcome)>,
}

fn queue_with(deadline: Duration, max_jobs: usize) -> Bench {
    queue_checked(deadline, max_jobs, false)
}

fn queue_checked(deadline: Duration, max_jobs: usize, copy_check: bool) -> Bench {
    let world = World::new();
    let device = Arc::new(CpuDevice::new(None).unwrap());
    let (sender, outcomes) = channel();
    let sender = std::sync::Mutex::new(sender);
    let config = QueueConfig {
        deadline,
        max_jobs,
        copy_check,
        on_done: Box::new(move |job, outcome| {
            sender.lock().unwrap().send((job, outcome)).unwrap();
        }),
    };
    let queue = CopyQueue::new(device.clone(), world.memory.clone(), config).unwrap();
    Bench {
        world,
        device,
        queue,
        outcomes,
    }
}

fn queue() -> Bench {
    queue_with(LONG, 64)
}

impl Bench {
    fn outcome(&self) -> (u64, CopyOutcome) {
        self.outcomes.recv_timeout(LONG).unwrap()
    }

    fn forward(&self, step: &StepHandle) {
        for layer in 0..self.world.layers() {
            step.before_layer(layer).unwrap();
            step.after_layer(layer).unwrap();
        }
    }
}

#[test]
fn a_layer_behind_its_gate_has_the_bytes_of_the_host() {
    let q = queue();
    q.world.fill_host();
    let mut job = load(7, &[(3, 1), (4, 2), (0, 5)]);
    job.state.push(StatePiece {
        device_slot: 1,
        host_slot: 2,
    });
    let step = q.queue.start_step(vec![job.clone()], None).unwrap();
    for layer in 0..q.world.layers() {
        step.before_layer(layer).unwrap();
        q.world.check_layer(layer, &job.kv, &job.state);
        step.after_layer(layer).unwrap();
    }
    assert_eq!(step.finish().unwrap(), Vec::<u64>::new());
    assert_eq!(q.outcome(), (7, CopyOutcome::Done));
    let stats = q.queue.stats();
    assert_eq!(stats.load.bytes, q.world.bytes(&job.kv, &job.state));
    assert!(stats.load.runs_after < stats.load.runs_before);
    assert_eq!((stats.load.jobs, stats.outstanding), (1, 0));
}

#[test]
fn what_is_stored_comes_back_by_load_in_every_plane() {
    let q = queue();
    q.world.fill_device();
    let store = StoreJob {
        job: 1,
        kv: vec![piece(2, 6, world::PAGE), piece(5, 7, 3)],
        state: vec![StatePiece {
            device_slot: 0,
            host_slot: 1,
        }],
    };
    let before = q.world.snapshot(&store.kv, &store.state);
    let after = q.queue.record_compute().unwrap();
    q.queue.submit_store(store.clone(), after).unwrap();
    q.queue.drain(LONG).unwrap();
    assert_eq!(q.outcome(), (1, CopyOutcome::Done));
    q.world.poison_device();
    let back = LoadJob {
        job: 2,
        kv: store.kv.clone(),
        state: store.state.clone(),
    };
    let step = q.queue.start_step(vec![back], None).unwrap();
    assert_eq!(step.finish().unwrap(), Vec::<u64>::new());
    assert_eq!(q.world.snapshot(&store.kv, &store.state), before);
    q.world.check_poisoned_but(&store.kv, &store.state);
}

#[test]
fn a_window_streams_every_layer_through_its_buffers_over_many_steps() {
    let q = queue();
    q.world.fill_host();
    for (turn, width) in [(0, 2), (1, 2), (2, 2), (3, 2)] {
        let k0 = turn * world::KV_LAYERS;
        // Starts 0 and 2 of raw page 1, start 0 of raw page 2.
        let pages = [(1, 0), (1 + 2 * world::PAGES, 4), (2, 3)];
        let pieces: Vec<_> = pages
            .iter()
            .map(|&(d, h)| piece(d, h, world::PAGE))
            .collect();
        let window = WindowJob {
            job: u64::from(turn),
            pieces: pieces.clone(),
            k0: u64::from(k0),
            width,
        };
        let step = q.queue.start_step(Vec::new(), Some(window)).unwrap();
        for layer in 0..q.world.layers() {
            step.before_layer(layer).unwrap();
            q.world.check_window(layer, &pieces, k0, width);
            step.after_layer(layer).unwrap();
        }
        assert_eq!(step.finish().unwrap(), Vec::<u64>::new());
        assert_eq!(q.outcome().1, CopyOutcome::Done);
    }
}

#[test]
fn a_failed_copy_fails_its_job_alone_and_opens_its_gates() {
    for nth in [0, 1, 2 * world::KV_LAYERS - 1] {
        let q = queue();
        q.device.inject(Stream::Load, nth.into(), Injection::Fail);
        let loads = vec![load(1, &[(0, 0)]), load(2, &[(1, 1)])];
        let step = q.queue.start_step(loads, None).unwrap();
        q.forward(&step);
        let victim = 1 + u64::from(nth % 2);
        assert_eq!(step.finish().unwrap(), [victim]);
        let outcomes = [q.outcome(), q.outcome()];
        for (job, outcome) in outcomes {
            if job == victim {
                let failure = failed(&outcome);
                let page = u32::try_from(job - 1).ok();
                assert_eq!((failure.job, failure.page), (job, page));
                assert!(failure.plane.is_some() && failure.layer.is_some());
                assert!(failure.settled);
            } else {
                assert_eq!(outcome, CopyOutcome::Done);
            }
        }
        assert_eq!(q.queue.stats().failures, 1);
    }
}

#[test]
fn a_copy_that_never_ends_fails_its_job_and_the_queue_goes_on() {
    let q = queue_with(SHORT, 64);
    q.world.fill_host();
    q.device.inject(Stream::Load, 1, Injection::Hang);
    let step = q.queue.start_step(vec![load(1, &[(0, 0)])], None).unwrap();
    q.forward(&step);
    assert_eq!(step.finish().unwrap(), [1]);
    let (job, outcome) = q.outcome();
    let failure = failed(&outcome);
    assert_eq!((job, failure.job, failure.settled), (1, 1, false));
    assert!(failure.to_string().contains("copy job 1"), "{failure}");
    assert!(failure.text.contains("did not end within"), "{failure}");

    let next = load(2, &[(1, 1)]);
    let step = q.queue.start_step(vec![next.clone()], None).unwrap();
    assert_eq!(step.finish().unwrap(), Vec::<u64>::new());
    assert_eq!(q.outcome(), (2, CopyOutcome::Done));
    q.world.check_layer(0, &next.kv, &[]);
    let stats = q.queue.stats();
    assert_eq!((stats.time_outs, stats.unsettled), (1, 1));
    q.queue.shutdown();
}

#[test]
fn a_window_copy_that_never_ends_opens_the_gates_and_its_pages_are_left_alone() {
    let q = queue_with(SHORT, 64);
    q.device.inject(Stream::Window, 3, Injection::Hang);
    let window = |job, page, k0| WindowJob {
        job,
        pieces: vec![piece(page, 1, world::PAGE)],
        k0,
        width: 2,
    };
    // The page of the first may still be written: the second must not touch it.
    for (job, page, failed) in [(1, 1, true), (2, 1, true), (3, 2, false)] {
        let k0 = (job - 1) * u64::from(world::KV_LAYERS);
        let window = Some(window(job, page, k0));
        let step = q.queue.start_step(Vec::new(), window).unwrap();
        q.forward(&step);
        let wanted = if failed { vec![job] } else { Vec::new() };
        assert_eq!(step.finish().unwrap(), wanted);
    }
    let settled: Vec<bool> = q
        .outcomes
        .try_iter()
        .map(|(_, outcome)| match outcome {
            CopyOutcome::Failed(failure) => failure.settled,
            _ => true,
        })
        .collect();
    assert_eq!(settled, [false, true, true]);
}

#[test]
fn shutdown_gives_up_on_what_does_not_end() {
    let q = queue_with(LONG, 64);
    q.device.inject(Stream::Store, 0, Injection::Hang);
    let store = |job, host| StoreJob {
        job,
        kv: vec![piece(0, host, 1)],
        state: Vec::new(),
    };
    for job in 0..3 {
        let after = q.queue.record_compute().unwrap();
        let host = u32::try_from(job).unwrap();
        q.queue.submit_store(store(job, host), after).unwrap();
    }
    assert!(matches!(q.queue.drain(SHORT), Err(Error::Copy(f)) if f.job == 0));
    q.queue.shutdown_within(SHORT);
    for job in 0..3 {
        let (id, outcome) = q.outcome();
        assert_eq!((id, failed(&outcome).settled), (job, job != 0));
    }
    let after = q.queue.record_compute().unwrap();
    let late = q.queue.submit_store(store(9, 8), after);
    assert!(matches!(late, Err(Error::Closed { .. })));
    q.queue.shutdown();
    assert_eq!(q.queue.drain_for(Duration::ZERO), None);
}

#[test]
fn a_dropped_step_releases_everything() {
    let q = queue();
    let window = WindowJob {
        job: 1,
        pieces: vec![piece(1, 1, world::PAGE)],
        k0: 0,
        width: 2,
    };
    let step = q
        .queue
        .start_step(vec![load(2, &[(0, 0)])], Some(window))
        .unwrap();
    step.before_layer(0).unwrap();
    drop(step);
    q.queue.drain(LONG).unwrap();
    let mut outcomes = [q.outcome(), q.outcome()];
    outcomes.sort_by_key(|(job, _)| *job);
    assert_eq!(outcomes, [(1, CopyOutcome::Done), (2, CopyOutcome::Done)]);
}

#[test]
fn a_job_that_waits_for_its_buffers_can_be_cancelled_and_its_gates_open() {
    let q = queue();
    let window = |job, k0| WindowJob {
        job,
        pieces: vec![piece(1, 1, world::PAGE)],
        k0,
        width: 2,
    };
    let first = q.queue.start_step(Vec::new(), Some(window(1, 0))).unwrap();
    let k0 = u64::from(world::KV_LAYERS);
    let second = q.queue.start_step(Vec::new(), Some(window(2, k0))).unwrap();
    // The second cannot be submitted before the first forward has read its last layers.
    assert!(q.queue.cancel(2));
    assert!(!q.queue.cancel(2), "once");
    assert!(!q.queue.cancel(3), "no such job");
    q.forward(&first);
    assert_eq!(first.finish().unwrap(), Vec::<u64>::new());
    q.forward(&second);
    assert_eq!(second.finish().unwrap(), Vec::<u64>::new());
    let mut outcomes = [q.outcome(), q.outcome()];
    outcomes.sort_by_key(|(job, _)| *job);
    assert_eq!(
        outcomes,
        [(1, CopyOutcome::Done), (2, CopyOutcome::Cancelled)]
    );
    assert_eq!(q.queue.stats().cancels, 1);
}

#[test]
fn bad_jobs_are_refused_and_nothing_is_taken() {
    let q = queue_with(LONG, 2);
    let refused = |loads, window, field: &str| match q.queue.start_step(loads, window) {
        Err(Error::InvalidRequest { field: named, .. }) => assert_eq!(named, field),
        other => panic!("{:?}", other.err()),
    };
    let window = |pieces, width| {
        Some(WindowJob {
            job: 5,
            pieces,
            k0: 0,
            width,
        })
    };
    refused(vec![load(1, &[(world::PAGES, 0)])], None, "device_page");
    refused(vec![load(1, &[(0, world::HOST_PAGES)])], None, "host_page");
    refused(
        vec![load(1, &[(0, 0)]), load(2, &[(0, 1)])],
        None,
        "device_page",
    );
    refused(vec![load(1, &[])], None, "pieces");
    refused(vec![load(1, &[(0, 0)]), load(1, &[(1, 1)])], None, "job");
    refused(vec![], window(vec![piece(0, 0, 1)], 0), "width");
    refused(
        vec![],
        window(vec![piece(0, 0, 1)], world::KV_LAYERS + 1),
        "width",
    );
    refused(
        vec![],
        window(vec![piece(world::PAGES, 0, 1)], 2),
        "device_page",
    );
    let loads = (0..3).map(|job| load(job.into(), &[(job, job)])).collect();
    let full = q.queue.start_step(loads, None);
    assert!(matches!(
        full.err(),
        Some(Error::CopyQueueFull {
            live: 0,
            asked: 3,
            max_jobs: 2
        })
    ));
    assert_eq!(q.queue.drain_for(Duration::ZERO), None);

    let step = q
        .queue
        .start_step(Vec::new(), window(vec![piece(0, 0, 1)], 2))
        .unwrap();
    refused(vec![load(5, &[(0, 0)])], None, "job");
    drop(step);
    q.queue.drain(LONG).unwrap();
    refused(vec![], window(vec![piece(0, 0, 1)], 2), "k0");
}

#[test]
fn limits_of_zero_are_refused() {
    let world = World::new();
    assert!(CpuDevice::new(Some(0)).is_err());
    let device = Arc::new(CpuDevice::new(None).unwrap());
    for (deadline, max_jobs) in [(LONG, 0), (Duration::ZERO, 1)] {
        let config = QueueConfig {
            deadline,
            max_jobs,
            copy_check: false,
            on_done: Box::new(|_, _| ()),
        };
        let queue = CopyQueue::new(device.clone(), world.memory.clone(), config);
        assert!(matches!(queue.err(), Some(Error::Config { .. })));
    }
}

#[test]
fn a_checked_load_of_other_bytes_than_were_stored_fails() {
    let q = queue_checked(LONG, 64, true);
    q.world.fill_device();
    let kv = vec![piece(2, 6, world::PAGE), piece(5, 7, 3)];
    let state = vec![StatePiece {
        device_slot: 0,
        host_slot: 1,
    }];
    let store = StoreJob {
        job: 1,
        kv: kv.clone(),
        state: state.clone(),
    };
    let after = q.queue.record_compute().unwrap();
    q.queue.submit_store(store, after).unwrap();
    q.queue.drain(LONG).unwrap();
    let load = |job| {
        let (kv, state) = (kv.clone(), state.clone());
        let step = q.queue.start_step(vec![LoadJob { job, kv, state }], None);
        step.unwrap().finish().unwrap()
    };
    assert_eq!(load(2), Vec::<u64>::new());
    for plane in 0..q.world.memory.planes().len() {
        let undo = q.world.corrupt_host(plane, &kv, &state);
        assert_eq!(load(3), [3]);
        let (_, outcome) = q.outcomes.iter().find(|(job, _)| *job == 3).unwrap();
        let failure = failed(&outcome);
        let name = q.world.memory.planes().name(plane);
        assert_eq!(failure.plane.as_deref(), Some(name));
        assert!(failure.text.contains("checksum"), "{failure}");
        undo();
    }
    assert_eq!(load(4), Vec::<u64>::new());
}
