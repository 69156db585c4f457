//! A small engine over the queue: allocates pages, runs steps, stores, aborts, with every thread's
//! next move drawn by seed. It knows what every kernel must read, and what the queue owes it.

mod forward;
mod outcomes;
mod start;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use headrace_core::{
    HostPage, KvPiece, KvPlane, KvShape, LayerKind, Planes, StatePiece, StatePlane, StateShape,
};

use super::super::edges::Edge;
use super::super::*;
use crate::device::Progress;
use crate::queue::machine::Machine;
use crate::regions::{CopyMemory, Region};
use crate::sim::{CELL, Kernel, Read, SimDevice, SimFault, Write};

const DEVICE: u64 = 1 << 40;
const HOST: u64 = 1 << 41;
const PLANE_SPAN: u64 = 1 << 20;
const KV_LAYERS: u32 = 3;
const HIGH_PAGES: usize = 3;
/// Raw pages: those for HIGH, and one that LOW requests use.
const PAGES: u32 = 4;
const HOST_PAGES: usize = 5;
const TOKENS: u32 = 2;
const SLOTS: usize = 2;
const SNAPSHOTS: usize = 2;
const STEPS: usize = 5;
const DEADLINE: Duration = Duration::from_secs(1);
const MODEL: [LayerKind; 5] = [
    LayerKind::Kv(0),
    LayerKind::State(0),
    LayerKind::Kv(1),
    LayerKind::Kv(2),
    LayerKind::State(1),
];
const KV_PLANES: u64 = 2;

/// A rule of the engine's side that a test breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Slip {
    /// A freed page is allocated while a step that names it runs.
    ReuseBeforeRetired,
    /// A page whose copy never ended is allocated.
    ReuseUnsettled,
    /// The ticket of a store is recorded before its page's writer is enqueued.
    TicketBeforeWriter,
    /// A step writes a page that is being stored.
    WriteUnderStore,
    /// A host page is loaded from before its store is acknowledged.
    LoadBeforePublished,
    /// A kernel reads loaded bytes without passing the gate.
    SecondPath,
    /// A layer is released before its kernel is enqueued.
    ReleaseBeforeReader,
    /// The device reorders a stream.
    StreamOutOfOrder,
    /// Host memory goes while jobs live.
    UnmapBeforeDrain,
    /// A plane is missing in the registry.
    PlaneForgotten,
}

/// How often a trace met what it is there for.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Coverage {
    done: u64,
    failed: u64,
    cancelled: u64,
    unsettled: u64,
    windows: u64,
    stores: u64,
    states: u64,
}

impl Coverage {
    pub(super) fn add(&mut self, other: &Self) {
        self.done += other.done;
        self.failed += other.failed;
        self.cancelled += other.cancelled;
        self.unsettled += other.unsettled;
        self.windows += other.windows;
        self.stores += other.stores;
        self.states += other.states;
    }

    pub(super) fn is_full(&self) -> bool {
        let all = [
            self.done,
            self.failed,
            self.cancelled,
            self.unsettled,
            self.windows,
            self.stores,
            self.states,
        ];
        all.iter().all(|&count| count >= 10)
    }
}

/// What is in a page: versions of its cells are made of it.
type Content = u64;

fn version(content: Content, plane: u64, layer: u32) -> u64 {
    content * 1000 + plane * 100 + u64::from(layer)
}

/// Who holds a page or slot of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Free once step `fence` has retired.
    Free { fence: usize },
    /// The destination of a load.
    Loading,
    /// Holds `content`; `stores` jobs read it.
    Valid { content: Content, stores: u32 },
    /// Lost to a copy that never ended.
    Quarantined,
}

/// A page or snapshot on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Host {
    Empty,
    /// The destination of a store.
    Storing {
        content: Content,
    },
    Valid {
        content: Content,
        loads: u32,
    },
    Quarantined,
}

/// What a job holds.
#[derive(Clone, Debug)]
enum Lease {
    Load {
        page: usize,
        from: usize,
        content: Content,
        state: Option<(usize, usize, Content)>,
        step: usize,
    },
    Window {
        pieces: Vec<(u32, usize, Content)>,
    },
    Store {
        page: usize,
        to: usize,
        content: Content,
        state: Option<(usize, usize, Content)>,
    },
}

/// (flat page, content) of a window, its first running index, its job.
type LowRows = (Vec<(u32, Content)>, u64, u64);

/// The step whose forward is being enqueued.
struct Forward {
    handle: StepHandle,
    /// (page, content, job that loads it)
    reads: Vec<(usize, Content, Option<u64>)>,
    states: Vec<(usize, Content, Option<u64>)>,
    window: Option<LowRows>,
    /// Page that gets new tokens.
    tail: Option<(usize, Content)>,
    /// New content of a state slot that is updated in place.
    update: Option<(usize, Content)>,
    layer: usize,
    passed: bool,
}

/// Outcomes by job, in order.
type Delivered = Arc<Mutex<Vec<(u64, CopyOutcome)>>>;

pub(super) struct Trace {
    seed: u64,
    slip: Option<Slip>,
    width: u32,
    sim: Arc<SimDevice>,
    queue: CopyQueue,
    machine: Machine,
    delivered: Delivered,
    now_ns: u64,
    pages: [Place; HIGH_PAGES],
    slots: [Place; SLOTS],
    low: [Place; 3],
    host: [Host; HOST_PAGES],
    snapshots: [Host; SNAPSHOTS],
    leases: BTreeMap<u64, Lease>,
    ended: BTreeMap<u64, u32>,
    forward: Option<Forward>,
    finishing: Vec<StepHandle>,
    retires: Vec<Option<Ticket>>,
    early_ticket: Option<Ticket>,
    next_job: u64,
    next_content: Content,
    next_k: u64,
    coverage: Coverage,
    unmapped: bool,
    cancelled: BTreeSet<u64>,
    /// Waits for the tokens of a step before it starts the next.
    waits: bool,
    /// Outcomes are delivered late.
    lazy: bool,
}

fn planes(all: bool) -> Planes {
    let kv = KvShape {
        layers: KV_LAYERS,
        pages: PAGES,
        page_tokens: TOKENS,
        host_pages: u32::try_from(HOST_PAGES).unwrap(),
        host_page_tokens: TOKENS,
    };
    let state = StateShape {
        layers: 2,
        slots: u32::try_from(SLOTS).unwrap(),
        snapshots: u32::try_from(SNAPSHOTS).unwrap(),
    };
    let page_stride = u64::from(TOKENS) * CELL;
    let kv_planes = (0..KV_PLANES).map(|plane| KvPlane {
        name: format!("kv{plane}"),
        token_bytes: CELL,
        page_stride,
        layer_stride: page_stride * u64::from(PAGES),
    });
    let kv_planes = kv_planes.take(if all { 2 } else { 1 }).collect();
    let state_plane = StatePlane {
        name: "state".to_owned(),
        bytes: CELL,
        slot_stride: CELL,
        layer_stride: CELL * SLOTS as u64,
    };
    Planes::new(kv, kv_planes, state, vec![state_plane], MODEL.to_vec()).unwrap()
}

/// Plane number of the state in versions and addresses, whatever is registered.
const STATE: u64 = KV_PLANES;

fn page_address(base: u64, plane: u64, pages: u64, layer: u32, page: u64) -> u64 {
    let flat = u64::from(layer) * pages + page;
    base + plane * PLANE_SPAN + flat * u64::from(TOKENS) * CELL
}

fn slot_address(base: u64, slots: usize, layer: u32, slot: usize) -> u64 {
    base + STATE * PLANE_SPAN + (u64::from(layer) * slots as u64 + slot as u64) * CELL
}

impl Trace {
    pub(super) fn new(seed: u64, missing: Option<Edge>, slip: Option<Slip>) -> Self {
        let planes = planes(slip != Some(Slip::PlaneForgotten));
        let count = planes.len() as u64;
        let region = |base: u64| {
            let plane = |index: u64| if index + 1 == count { STATE } else { index };
            let at = move |index| Region::virtual_at(base + plane(index) * PLANE_SPAN, PLANE_SPAN);
            (0..count).map(at).collect()
        };
        let memory = CopyMemory::new(planes, region(DEVICE), region(HOST)).unwrap();
        let sim = Arc::new(SimDevice::new(Box::new(|_| 1)));
        if slip == Some(Slip::StreamOutOfOrder) {
            sim.break_order();
        }
        let delivered = Delivered::default();
        let list = delivered.clone();
        let config = QueueConfig {
            deadline: DEADLINE,
            max_jobs: 64,
            copy_check: false,
            on_done: Box::new(move |job, outcome| list.lock().unwrap().push((job, outcome))),
        };
        let edges = Edges { missing };
        let device: Arc<dyn Device> = sim.clone();
        let made = CopyQueue::without_worker(device, Arc::new(memory), config, edges);
        let (queue, machine) = made.unwrap();
        let mut trace = Self {
            seed: seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1,
            slip,
            width: 0,
            sim,
            queue,
            machine,
            delivered,
            now_ns: 0,
            pages: [Place::Free { fence: 0 }; HIGH_PAGES],
            slots: [Place::Free { fence: 0 }; SLOTS],
            low: [Place::Free { fence: 0 }; 3],
            host: [Host::Empty; HOST_PAGES],
            snapshots: [Host::Empty; SNAPSHOTS],
            leases: BTreeMap::new(),
            ended: BTreeMap::new(),
            forward: None,
            finishing: Vec::new(),
            retires: vec![None],
            early_ticket: None,
            next_job: 1,
            next_content: 1,
            next_k: 0,
            coverage: Coverage::default(),
            unmapped: false,
            cancelled: BTreeSet::new(),
            waits: false,
            lazy: false,
        };
        trace.width = 1 + trace.draw(3);
        trace.waits = trace.chance(2);
        trace.lazy = trace.chance(2);
        trace.fill_host();
        trace.inject();
        trace
    }

    fn draw(&mut self, n: u32) -> u32 {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        u32::try_from((self.seed >> 11) % u64::from(n)).unwrap()
    }

    /// One of `n` in a `1 / n` chance.
    fn chance(&mut self, n: u32) -> bool {
        self.draw(n) == 0
    }

    fn slips(&self, slip: Slip) -> bool {
        self.slip == Some(slip)
    }

    fn content(&mut self) -> Content {
        self.next_content += 1;
        self.next_content
    }

    fn job(&mut self) -> u64 {
        self.next_job += 1;
        self.next_job
    }

    fn fill_host(&mut self) {
        for page in 0..3 {
            let content = self.content();
            self.host[page] = Host::Valid { content, loads: 0 };
            for plane in 0..KV_PLANES {
                for layer in 0..KV_LAYERS {
                    let pages = HOST_PAGES as u64;
                    self.sim.preset(Write {
                        address: page_address(HOST, plane, pages, layer, page as u64),
                        bytes: u64::from(TOKENS) * CELL,
                        version: version(content, plane, layer),
                    });
                }
            }
        }
        let content = self.content();
        self.snapshots[0] = Host::Valid { content, loads: 0 };
        for layer in 0..2 {
            self.sim.preset(Write {
                address: slot_address(HOST, SNAPSHOTS, layer, 0),
                bytes: CELL,
                version: version(content, STATE, layer),
            });
        }
    }

    /// Most traces have a fault somewhere.
    fn inject(&mut self) {
        let hang = self.draw(4) == 0 || self.slips(Slip::ReuseUnsettled);
        for stream in Stream::COPY {
            if self.chance(2) {
                continue;
            }
            let nth = u64::from(self.draw(12));
            let fault = match self.draw(3) {
                0 if hang => SimFault::Hang,
                1 => SimFault::Refuse,
                _ => SimFault::Fail,
            };
            self.sim.inject(stream, nth, fault);
        }
    }

    /// Runs to the end of the last job. The error says what broke.
    pub(super) fn run(mut self) -> std::result::Result<Coverage, String> {
        let mut idle = 0;
        while idle < 3 * 40 {
            let moved = match self.draw(3) {
                0 => self.engine(),
                1 => self.worker(),
                _ => self.device(),
            };
            self.receive()?;
            self.check()?;
            idle = if moved { 0 } else { idle + 1 };
            if idle == 60 {
                // Nobody can move: something hangs, and only time helps.
                self.now_ns += u64::try_from(DEADLINE.as_nanos()).unwrap();
            }
        }
        self.finish()
    }

    fn device(&mut self) -> bool {
        let sim = self.sim.clone();
        sim.step(&mut |n| self.draw(u32::try_from(n).unwrap()) as usize)
    }

    fn worker(&mut self) -> bool {
        let command = if self.chance(2) {
            self.queue.shared.desk.next(Duration::ZERO)
        } else {
            None
        };
        let moved = if let Some(command) = command {
            self.machine.accept(command);
            true
        } else {
            self.machine.advance(self.now_ns)
        };
        for job in self.machine.failed() {
            self.sim.excuse(job);
        }
        let seldom = if self.lazy { 40 } else { 2 };
        if self.chance(seldom) {
            self.machine.deliver();
        }
        moved
    }

    fn finish(mut self) -> std::result::Result<Coverage, String> {
        self.machine.deliver();
        self.receive()?;
        self.check()?;
        if self.forward.is_some() || self.retires.len() <= STEPS {
            return Err(format!("stalled in step {}", self.retires.len()));
        }
        if let Some(job) = self.queue.drain_for(Duration::ZERO) {
            return Err(format!("job {job} never ended"));
        }
        if !self.leases.is_empty() {
            return Err(format!("leases left: {:?}", self.leases));
        }
        if self
            .finishing
            .iter()
            .any(|step| step.finish_for(Duration::ZERO).is_none())
        {
            return Err("a step has jobs that are not terminal".to_owned());
        }
        let pinned = self
            .host
            .iter()
            .chain(&self.snapshots)
            .any(|host| match host {
                Host::Valid { loads, .. } => *loads > 0,
                host => matches!(host, Host::Storing { .. }),
            });
        let held = self.pages.iter().chain(&self.slots).chain(&self.low);
        let held = held.copied().any(|place| match place {
            Place::Valid { stores, .. } => stores > 0,
            place => place == Place::Loading,
        });
        if pinned || held {
            return Err(format!("pages left: {:?} {:?}", self.pages, self.host));
        }
        let stats = self.queue.stats();
        let lost = stats.load.in_flight + stats.window.in_flight + stats.store.in_flight;
        if lost > 0 {
            return Err(format!("tickets left: {stats:?}"));
        }
        Ok(self.coverage)
    }

    fn check(&self) -> std::result::Result<(), String> {
        match self.sim.violations().first() {
            None => Ok(()),
            Some(first) => Err(first.clone()),
        }
    }

    // The engine thread.

    /// Does the engine's next thing; false if it waits, or has nothing to do.
    fn engine(&mut self) -> bool {
        if !self.leases.is_empty() && self.chance(24) {
            let at = self.draw(u32::try_from(self.leases.len()).unwrap()) as usize;
            let job = *self.leases.keys().nth(at).unwrap();
            if self.queue.cancel(job) {
                self.cancelled.insert(job);
                self.sim.excuse(job);
                return true;
            }
        }
        if self.forward.is_some() {
            return self.forward_on();
        }
        if self.retires.len() <= STEPS {
            let last = self.retires.last().cloned().flatten();
            if self.waits && last.is_some_and(|ticket| !self.is_done(&ticket)) {
                return false;
            }
            self.free_some();
            self.start();
            return true;
        }
        if self.slips(Slip::UnmapBeforeDrain) || self.leases.is_empty() {
            let last = self.retires.last().cloned().flatten();
            let retired = last.is_some_and(|ticket| self.is_done(&ticket));
            let ghosts = self.coverage.unsettled > 0;
            let safe = retired && !ghosts;
            if !self.unmapped && (self.slips(Slip::UnmapBeforeDrain) || safe) {
                self.unmapped = true;
                self.sim.unmap(HOST, (STATE + 1) * PLANE_SPAN);
            }
        }
        false
    }

    fn is_done(&self, ticket: &Ticket) -> bool {
        self.sim.query(ticket).unwrap() != Progress::Pending
    }

    fn is_free(&self, place: Place) -> bool {
        match place {
            Place::Free { fence } => {
                let ticket = self.retires.get(fence).cloned().flatten();
                let retired = fence == 0 || ticket.is_some_and(|ticket| self.is_done(&ticket));
                retired || self.slips(Slip::ReuseBeforeRetired)
            }
            Place::Quarantined => self.slips(Slip::ReuseUnsettled),
            Place::Loading | Place::Valid { .. } => false,
        }
    }

    fn free_page(&self) -> Option<usize> {
        (0..HIGH_PAGES).find(|&page| self.is_free(self.pages[page]))
    }

    fn free_some(&mut self) {
        let fence = self.retires.len() - 1;
        for page in 0..HIGH_PAGES {
            let unpinned = matches!(self.pages[page], Place::Valid { stores: 0, .. });
            if unpinned && self.chance(2) {
                self.pages[page] = Place::Free { fence };
            }
        }
        for slot in 0..SLOTS {
            let unpinned = matches!(self.slots[slot], Place::Valid { stores: 0, .. });
            if unpinned && self.chance(3) {
                self.slots[slot] = Place::Free { fence };
            }
        }
        for page in 0..HOST_PAGES {
            let unpinned = matches!(self.host[page], Host::Valid { loads: 0, .. });
            let valid = self
                .host
                .iter()
                .filter(|h| matches!(h, Host::Valid { .. }))
                .count();
            if unpinned && valid > 2 && self.chance(3) {
                self.host[page] = Host::Empty;
            }
        }
    }
}

fn piece(page: usize, host: usize) -> KvPiece {
    KvPiece {
        device_page: u32::try_from(page).unwrap(),
        device_token: 0,
        host_page: HostPage(u32::try_from(host).unwrap()),
        tokens: TOKENS,
    }
}

fn state_piece(slot: usize, snapshot: usize) -> StatePiece {
    StatePiece {
        device_slot: u32::try_from(slot).unwrap(),
        host_slot: u32::try_from(snapshot).unwrap(),
    }
}
