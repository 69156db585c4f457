//! A driver for tests: streams are queues over memory of this process.
//!
//! Every GPU ordinal is a fake of its own, found again through the context that is current on the
//! calling thread, as the real driver does. What is enqueued runs when the test says so, in any
//! legal order, or at once. Memory that kernels see has other addresses than the host's, so that
//! mixing them up is found; lists of pieces are read when the kernel runs, not when it is launched.
#![expect(
    unsafe_code,
    clippy::undocumented_unsafe_blocks,
    reason = "test code: addresses are those of the test's own memory; it fails by panicking"
)]

mod calls;

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::ffi::{CStr, c_char, c_void};
use std::sync::{Arc, LazyLock};

use headrace_core::sync::Mutex;

use super::driver::{
    CopyAttributes, DevicePtr, Driver, Handle, HostFn, NOT_READY, SUCCESS, Status,
};
use super::pinned::Piece;

pub(super) const INVALID_VALUE: Status = 1;
pub(super) const INVALID_CONTEXT: Status = 201;
/// Handle of the stream that stands for torch's.
pub(super) const COMPUTE: Handle = 77;
/// Added to an address of the host where kernels see it.
pub(super) const MAPPED: u64 = 1 << 60;
const KERNEL: Handle = 5;

/// What the driver was asked to enqueue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Call {
    Copy(Handle, u64, u64, u64),
    Batch(Handle, usize, bool),
    Launch(Handle, u32, u32, u32),
    Record(Handle, Handle),
    Wait(Handle, Handle),
    WriteValue(Handle, u64, u32),
    WaitValue(Handle, u64, u32),
    HostFn(Handle),
    Register(u64, usize),
    Unregister(u64),
    FreePinned(u64),
    StreamCreate(Handle),
    StreamDestroy(Handle),
    EventDestroy(Handle),
    ContextRelease,
}

enum Op {
    Copy(u64, u64, u64),
    Kernel(u64, u32),
    Record(Handle, u64),
    Wait(Handle, u64),
    WriteValue(u64, u32),
    WaitValue(u64, u32),
    Host(HostFn, usize),
}

#[derive(Default)]
struct State {
    next: Handle,
    eager: bool,
    streams: BTreeMap<Handle, VecDeque<Op>>,
    /// (records enqueued, records run).
    events: BTreeMap<Handle, (u64, u64)>,
    /// Registered or allocated host memory: first address and length.
    pinned: BTreeMap<u64, usize>,
    allocated: BTreeMap<u64, Vec<u64>>,
    stuck: Vec<Handle>,
    calls: Vec<Call>,
    failures: Vec<(&'static str, u32, Status)>,
    attributes: Vec<CopyAttributes>,
}

/// One fake GPU.
pub(super) struct Fake {
    pub(super) ordinal: u32,
    state: Mutex<State>,
}

static FAKES: LazyLock<Mutex<Vec<Arc<Fake>>>> = LazyLock::new(|| Mutex::new(Vec::new()));

thread_local! {
    static CURRENT: RefCell<Vec<Handle>> = const { RefCell::new(Vec::new()) };
}

/// Contexts are ordinals + 1: never zero.
fn fake_of(context: Handle) -> Option<Arc<Fake>> {
    FAKES.lock().get(context.checked_sub(1)?).cloned()
}

/// How many contexts are current on this thread.
pub(super) fn depth() -> usize {
    CURRENT.with_borrow(Vec::len)
}

impl Fake {
    /// A GPU of its own; eager ones run what is enqueued at once, as far as it can.
    pub(super) fn new(eager: bool) -> Arc<Self> {
        let mut fakes = FAKES.lock();
        let mut state = State {
            next: 1000,
            eager,
            ..State::default()
        };
        state.streams.insert(COMPUTE, VecDeque::new());
        let fake = Arc::new(Self {
            ordinal: u32::try_from(fakes.len()).unwrap(),
            state: Mutex::new(state),
        });
        fakes.push(fake.clone());
        fake
    }

    pub(super) fn driver(batch: bool) -> Driver {
        Driver {
            memcpy_batch: batch.then_some(calls::memcpy_batch as super::driver::BatchCopy),
            ..calls::table()
        }
    }

    /// The `nth` (0: the next) call of this name fails.
    pub(super) fn fail(&self, call: &'static str, nth: u32, status: Status) {
        self.state.lock().failures.push((call, nth, status));
    }

    /// A stream that never goes on.
    pub(super) fn stick(&self, stream: Handle) {
        self.state.lock().stuck.push(stream);
    }

    /// Lets it go on.
    pub(super) fn unstick(&self, stream: Handle) {
        self.state.lock().stuck.retain(|&stuck| stuck != stream);
    }

    /// Work of the forward: it writes `source` to `target`.
    pub(super) fn compute(&self, target: u64, source: &'static [u8]) {
        let from = source.as_ptr().expose_provenance() as u64;
        let queue = Op::Copy(target, from, source.len() as u64);
        let mut state = self.state.lock();
        state.streams.get_mut(&COMPUTE).unwrap().push_back(queue);
    }

    /// What was enqueued since the last call.
    pub(super) fn take_calls(&self) -> Vec<Call> {
        std::mem::take(&mut self.state.lock().calls)
    }

    pub(super) fn attributes(&self) -> Vec<CopyAttributes> {
        self.state.lock().attributes.clone()
    }

    pub(super) fn pinned(&self) -> Vec<(u64, usize)> {
        let state = self.state.lock();
        state.pinned.iter().map(|(&at, &len)| (at, len)).collect()
    }

    pub(super) fn streams(&self) -> Vec<Handle> {
        let state = self.state.lock();
        let own = state.streams.keys().filter(|&&stream| stream != COMPUTE);
        own.copied().collect()
    }

    /// Runs all that can run.
    pub(super) fn run(&self) {
        self.state.lock().run();
    }

    /// Runs one operation of those that can, chosen by `pick`; false if none can.
    pub(super) fn step(&self, pick: u64) -> bool {
        let mut state = self.state.lock();
        let ready = state.ready();
        if ready.is_empty() {
            return false;
        }
        let index = usize::try_from(pick % ready.len() as u64).unwrap();
        state.run_front(ready[index]);
        true
    }
}

impl State {
    fn failing(&mut self, call: &'static str) -> Option<Status> {
        let due = self
            .failures
            .iter()
            .position(|&(name, nth, _)| name == call && nth == 0);
        let status = due.map(|index| self.failures.remove(index).2);
        let later = self.failures.iter_mut().filter(|(name, ..)| *name == call);
        later.for_each(|(_, nth, _)| *nth = nth.saturating_sub(1));
        status
    }

    fn handle(&mut self) -> Handle {
        self.next += 1;
        self.next
    }

    fn push(&mut self, stream: Handle, call: Call, op: Op) -> Status {
        self.calls.push(call);
        let Some(queue) = self.streams.get_mut(&stream) else {
            return 400;
        };
        queue.push_back(op);
        if self.eager {
            self.run();
        }
        SUCCESS
    }

    fn ready(&self) -> Vec<Handle> {
        let can = |(stream, queue): (&Handle, &VecDeque<Op>)| {
            let go = match queue.front()? {
                Op::Wait(event, record) => self.events.get(event).is_none_or(|e| e.1 >= *record),
                Op::WaitValue(at, value) => {
                    let word = unsafe { (self.host(*at, 4) as *const u32).read() };
                    crate::device::word_reached(word, *value)
                }
                _ => true,
            };
            (go && !self.stuck.contains(stream)).then_some(*stream)
        };
        self.streams.iter().filter_map(can).collect()
    }

    fn run(&mut self) {
        while let Some(&stream) = self.ready().first() {
            self.run_front(stream);
        }
    }

    fn run_front(&mut self, stream: Handle) {
        let op = self.streams.get_mut(&stream).unwrap().pop_front().unwrap();
        match op {
            Op::Copy(target, source, bytes) => unsafe { copy(target, source, bytes) },
            Op::Kernel(list, count) => {
                let len = count as usize * size_of::<Piece>();
                let list = self.host(list, len) as *const Piece;
                for index in 0..count as usize {
                    let piece = unsafe { list.add(index).read() };
                    let len = usize::try_from(piece.bytes).unwrap();
                    let at = |address| {
                        if address >= MAPPED {
                            self.host(address, len)
                        } else {
                            address
                        }
                    };
                    let mapped = [piece.source, piece.target].map(|a| a >= MAPPED);
                    assert_ne!(mapped[0], mapped[1], "one side is the host");
                    unsafe { copy(at(piece.target), at(piece.source), piece.bytes) };
                }
            }
            Op::Record(event, record) => {
                if let Some(e) = self.events.get_mut(&event) {
                    e.1 = e.1.max(record);
                }
            }
            Op::Wait(..) | Op::WaitValue(..) => {}
            Op::WriteValue(at, value) => unsafe { (self.host(at, 4) as *mut u32).write(value) },
            Op::Host(function, value) => function(std::ptr::without_provenance_mut(value)),
        }
    }

    /// The host's address of mapped memory, all of which must be pinned in one piece.
    fn host(&self, mapped: u64, bytes: usize) -> u64 {
        let address = mapped.checked_sub(MAPPED).expect("an address of the GPU");
        assert!(self.is_pinned(address, bytes), "not pinned in one piece");
        address
    }

    fn is_pinned(&self, address: u64, bytes: usize) -> bool {
        let before = self.pinned.range(..=address).next_back();
        before.is_some_and(|(&first, &len)| address + bytes as u64 <= first + len as u64)
    }
}

unsafe fn copy(target: u64, source: u64, bytes: u64) {
    let len = usize::try_from(bytes).unwrap();
    unsafe { std::ptr::copy_nonoverlapping(source as *const u8, target as *mut u8, len) };
}
