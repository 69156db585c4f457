//! Every interleaving of the engine and the worker over a device whose copies end at once. A wait
//! of the model has no time limit, so a wake-up that is lost is a deadlock, which it reports.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use headrace_core::{
    HostPage, KvPiece, KvPlane, KvShape, LayerKind, Mechanism, Planes, StateShape, Thresholds,
};
use loom::thread;

use super::machine::Machine;
use super::*;
use crate::device::{LayerCopy, Progress, Waker, Word};
use crate::regions::Region;

const WAIT: Duration = Duration::from_secs(1);
/// More preemptions than any of the hand-shakes has steps that matter.
const PREEMPTIONS: usize = 3;

/// Counts what is enqueued; everything is over at once.
#[derive(Default)]
struct Counter {
    copies: AtomicU32,
    records: [AtomicU32; 4],
}

impl Counter {
    fn copies(&self) -> u32 {
        self.copies.load(Ordering::SeqCst)
    }

    fn records(&self, stream: Stream) -> u32 {
        self.records[stream.index()].load(Ordering::SeqCst)
    }
}

impl Device for Counter {
    fn name(&self) -> &'static str {
        "counter"
    }

    fn check(&self, _: &CopyMemory) -> Result<()> {
        Ok(())
    }

    fn copy(&self, stream: Stream, _: Mechanism, batch: LayerCopy) -> Result<()> {
        if stream == Stream::Window && batch.k > 0 {
            let readers = self.records(Stream::Compute);
            assert!(
                u64::from(readers) >= batch.k,
                "buffer {} is in use",
                batch.k
            );
        }
        self.copies.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn record(&self, stream: Stream) -> Result<Ticket> {
        self.records[stream.index()].fetch_add(1, Ordering::SeqCst);
        Ok(Ticket::recorded(Arc::new(())))
    }

    fn wait(&self, _: Stream, _: &Ticket) -> Result<()> {
        Ok(())
    }

    fn join(&self, _: &Ticket, _: Duration) -> Result<bool> {
        Ok(true)
    }

    fn query(&self, _: &Ticket) -> Result<Progress> {
        Ok(Progress::Done)
    }

    fn word(&self) -> Result<Word> {
        Ok(Word(0))
    }

    fn write_value(&self, _: Stream, _: Word, _: u32) -> Result<()> {
        Ok(())
    }

    fn wait_value(&self, _: Stream, _: Word, _: u32) -> Result<()> {
        Ok(())
    }

    fn abandon(&self, _: Stream) {}

    fn watch(&self, _: Waker) -> bool {
        true
    }

    fn thresholds(&self) -> Thresholds {
        Thresholds {
            plain_bytes: 0,
            batch_bytes: None,
        }
    }
}

type Outcomes = Arc<std::sync::Mutex<Vec<(u64, CopyOutcome)>>>;

struct Model {
    device: Arc<Counter>,
    queue: CopyQueue,
    outcomes: Outcomes,
}

/// A queue over `layers` layers, and its worker on a thread of its own until `jobs` have ended.
fn model(layers: u32, jobs: usize) -> (Model, thread::JoinHandle<()>) {
    let shape = KvShape {
        layers,
        pages: 1,
        page_tokens: 1,
        host_pages: 1,
        host_page_tokens: 1,
    };
    let plane = KvPlane {
        name: "k".to_owned(),
        token_bytes: 8,
        layer_stride: 8,
        page_stride: 8,
    };
    let kinds = (0..layers).map(LayerKind::Kv).collect();
    let planes = Planes::new(shape, vec![plane], StateShape::default(), vec![], kinds).unwrap();
    let region = |at| vec![Region::virtual_at(at, 8 * u64::from(layers))];
    let memory = CopyMemory::new(planes, region(1 << 20), region(1 << 30)).unwrap();
    let device = Arc::new(Counter::default());
    let outcomes = Outcomes::default();
    let list = outcomes.clone();
    let config = QueueConfig {
        deadline: WAIT,
        max_jobs: 4,
        copy_check: false,
        on_done: Box::new(move |job, outcome| list.lock().unwrap().push((job, outcome))),
    };
    let made =
        CopyQueue::without_worker(device.clone(), Arc::new(memory), config, Edges::default());
    let (queue, machine) = made.unwrap();
    let (shared, list) = (queue.shared.clone(), outcomes.clone());
    let worker =
        thread::spawn(move || work(&shared, machine, || list.lock().unwrap().len() < jobs));
    let model = Model {
        device,
        queue,
        outcomes,
    };
    (model, worker)
}

/// The loop of the worker thread, less its clock.
fn work(shared: &Shared, mut machine: Machine, go_on: impl Fn() -> bool) {
    while go_on() {
        let mut command = shared.desk.next(WAIT);
        while let Some(taken) = command {
            machine.accept(taken);
            command = shared.desk.next(Duration::ZERO);
        }
        while machine.advance(0) {}
        machine.deliver();
    }
}

fn explore(test: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS);
    builder.check(test);
}

fn piece() -> KvPiece {
    KvPiece {
        device_page: 0,
        device_token: 0,
        host_page: HostPage(0),
        tokens: 1,
    }
}

fn load(job: u64) -> LoadJob {
    LoadJob {
        job,
        kv: vec![piece()],
        state: Vec::new(),
    }
}

fn window(job: u64, k0: u64) -> WindowJob {
    WindowJob {
        job,
        pieces: vec![piece()],
        k0,
        width: 1,
    }
}

/// Passes a gate; a wait that returns early is repeated, one that is never woken is a deadlock.
fn pass(step: &StepHandle, layer: usize) {
    while !step.before_layer_for(layer, WAIT).unwrap() {}
}

fn ended(m: &Model) -> Vec<(u64, CopyOutcome)> {
    m.outcomes.lock().unwrap().clone()
}

/// HST-02.
#[test]
fn a_consumer_blocks_until_the_event_is_recorded() {
    explore(|| {
        let (m, worker) = model(1, 1);
        let step = m.queue.start_step(vec![load(1)], None).unwrap();
        pass(&step, 0);
        assert_eq!((m.device.copies(), m.device.records(Stream::Load)), (1, 1));
        worker.join().unwrap();
    });
}

#[test]
fn a_window_load_is_not_submitted_before_its_reader_is_recorded() {
    explore(|| {
        let (m, worker) = model(2, 1);
        let step = m.queue.start_step(Vec::new(), Some(window(1, 0))).unwrap();
        for layer in 0..2 {
            pass(&step, layer);
            assert!(m.device.records(Stream::Window) > u32::try_from(layer).unwrap());
            step.after_layer(layer).unwrap();
        }
        worker.join().unwrap();
        assert_eq!(ended(&m), [(1, CopyOutcome::Done)]);
    });
}

#[test]
fn a_dropped_step_lets_the_worker_go_on() {
    explore(|| {
        let (m, worker) = model(2, 1);
        drop(m.queue.start_step(Vec::new(), Some(window(1, 0))).unwrap());
        worker.join().unwrap();
        assert_eq!(ended(&m), [(1, CopyOutcome::Done)]);
    });
}

#[test]
fn the_outcome_is_delivered_before_those_who_wait_go_on() {
    explore(|| {
        let (m, worker) = model(1, 1);
        let step = m.queue.start_step(vec![load(1)], None).unwrap();
        let failed = loop {
            if let Some(failed) = step.finish_for(WAIT) {
                break failed;
            }
        };
        assert_eq!((failed, ended(&m)), (vec![], vec![(1, CopyOutcome::Done)]));
        while m.queue.drain_for(WAIT).is_some() {}
        worker.join().unwrap();
    });
}

#[test]
fn a_drain_is_woken_by_the_last_job() {
    explore(|| {
        let (m, worker) = model(1, 1);
        let after = m.queue.record_compute().unwrap();
        let store = StoreJob {
            job: 1,
            kv: vec![piece()],
            state: Vec::new(),
        };
        m.queue.submit_store(store, after).unwrap();
        while m.queue.drain_for(WAIT).is_some() {}
        assert_eq!(ended(&m), [(1, CopyOutcome::Done)]);
        worker.join().unwrap();
    });
}

#[test]
fn a_cancel_beside_the_worker_gives_one_outcome() {
    explore(|| {
        let (m, worker) = model(1, 1);
        let step = m.queue.start_step(vec![load(1)], None).unwrap();
        let cancelled = m.queue.cancel(1);
        pass(&step, 0);
        worker.join().unwrap();
        let wanted = if cancelled {
            CopyOutcome::Cancelled
        } else {
            CopyOutcome::Done
        };
        assert_eq!(ended(&m), [(1, wanted)]);
        assert_eq!(m.device.copies() == 0, cancelled);
    });
}

#[test]
fn a_step_behind_another_waits_for_its_readers() {
    explore(|| {
        let (m, worker) = model(1, 2);
        let first = m.queue.start_step(Vec::new(), Some(window(1, 0))).unwrap();
        let second = m.queue.start_step(Vec::new(), Some(window(2, 1))).unwrap();
        pass(&first, 0);
        first.after_layer(0).unwrap();
        pass(&second, 0);
        worker.join().unwrap();
        assert_eq!(ended(&m).len(), 2);
    });
}
