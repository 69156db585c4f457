//! Many threads on one scheduler: every id ends exactly once and nothing is left.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;

use super::*;

const SUBMITTERS: u64 = 8;
const EACH: u64 = 12_500;
const SLOTS: u32 = 64;
/// Live requests of one thread; together they are more than the queue takes.
const WINDOW: usize = 40;
const SLICE: Duration = Duration::from_millis(100);
const MAX_SLICES: u32 = 300;

/// How often each id ended, as told by commit, fail and abort.
struct Ends(Vec<AtomicU8>);

impl Ends {
    fn count(&self, id: RequestId) {
        self.0[usize::try_from(id.0).unwrap()].fetch_add(1, Ordering::Relaxed);
    }
}

/// Stands in for the engine thread: random tokens, a bad one or a failed step now and then.
fn run(s: &Scheduler, ends: &Ends) {
    let mut random = Random(1);
    let mut idle = 0;
    loop {
        let plan = match s.next_plan(SLICE, || 0) {
            Ok(NextPlan::Plan(plan)) => plan,
            Ok(NextPlan::TimedOut) => {
                idle += 1;
                assert!(idle < MAX_SLICES, "stuck: {:?}", s.stats());
                continue;
            }
            Err(error) => {
                assert!(matches!(error, Error::Closed { .. }));
                return;
            }
        };
        idle = 0;
        if random.below(500) == 0 {
            let failed = s.fail(plan.epoch, "failed", 0).unwrap();
            for id in failed {
                ends.count(id);
            }
            continue;
        }
        let token = |_: &i64| match random.below(2000) {
            0 => -1,
            draw => i32::try_from(draw % 100).unwrap(),
        };
        let tokens: Vec<i32> = plan.sample_rows.iter().map(token).collect();
        let report = s.commit(plan.epoch, &tokens, &[], 0).unwrap();
        for (id, _) in report.finished {
            ends.count(id);
        }
        if random.below(200) == 0 {
            s.check().unwrap();
        }
    }
}

/// Waits for the result of `id` and takes it: there is one, once.
fn collect(s: &Scheduler, id: RequestId) {
    for slice in 0.. {
        match s.wait(id, SLICE).unwrap() {
            RequestStatus::Finished(seen) => {
                assert_eq!(*s.take_result(id).unwrap(), *seen);
                assert_eq!(s.take_result(id), Err(Error::UnknownRequest { id }));
                assert!(!s.abort(id, 0));
                return;
            }
            RequestStatus::Live { .. } => assert!(slice < MAX_SLICES, "{id:?} does not end"),
        }
    }
}

fn submit_all(s: &Scheduler, ends: &Ends, thread: u64) {
    let mut random = Random(1000 * (thread + 1));
    let mut live = VecDeque::new();
    for id in thread * EACH..(thread + 1) * EACH {
        let prompt = usize::try_from(1 + random.below(90)).unwrap();
        let mut spec = spec(id, prompt, u32::try_from(1 + random.below(4)).unwrap());
        spec.sampling.stop_token_ids = Box::new([7, 8]);
        while let Err(error) = s.submit(spec.clone(), 0) {
            assert!(matches!(error, Error::QueueFull { .. }));
            match live.pop_front() {
                Some(oldest) => collect(s, oldest),
                None => thread::yield_now(),
            }
        }
        live.push_back(RequestId(id));
        if random.below(8) == 0 {
            // Any id of this thread's latest: waiting, running, in flight or just ended.
            let victim = live[usize::try_from(random.below(live.len() as u64)).unwrap()];
            if s.abort(victim, 0) {
                ends.count(victim);
            }
        }
        if live.len() == WINDOW {
            collect(s, live.pop_front().unwrap());
        }
    }
    for id in live {
        collect(s, id);
    }
}

#[test]
fn hundred_thousand_requests_from_eight_threads_end_exactly_once() {
    let total = SUBMITTERS * EACH;
    let s = scheduler(
        SLOTS,
        SchedulerConfig {
            max_batch_tokens: 2048,
            max_waiting: 200,
            max_results: 1000,
            ..config()
        },
    );
    let ends = Ends((0..total).map(|_| AtomicU8::new(0)).collect());
    thread::scope(|scope| {
        let runner = scope.spawn(|| run(&s, &ends));
        let submitters: Vec<_> = (0..SUBMITTERS)
            .map(|thread| {
                let (s, ends) = (&s, &ends);
                scope.spawn(move || submit_all(s, ends, thread))
            })
            .collect();
        let joined: Vec<_> = submitters
            .into_iter()
            .map(thread::ScopedJoinHandle::join)
            .collect();
        s.close("done", FinishReason::Abort, 0);
        runner.join().unwrap();
        for result in joined {
            result.unwrap();
        }
    });
    assert!(
        ends.0
            .iter()
            .all(|count| count.load(Ordering::Relaxed) == 1)
    );
    let stats = s.stats();
    assert_eq!(
        (stats.submitted, stats.results, stats.results_dropped),
        (total, 0, 0)
    );
    let by_reason = [
        stats.finished_stop,
        stats.finished_length,
        stats.finished_abort,
        stats.finished_error,
    ];
    assert!(by_reason.iter().all(|&count| count > 0), "{by_reason:?}");
    s.drain(None, 0..0);
}
