//! Counters of a queue.

use crate::device::Stream;

/// Counters of one stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamStats {
    /// Bytes whose ticket is over.
    pub bytes: u64,
    /// Jobs that ended, whatever their outcome.
    pub jobs: u64,
    /// Pieces submitted, one per plane and layer.
    pub runs_before: u64,
    /// Runs submitted, after merging.
    pub runs_after: u64,
    /// Copies submitted per mechanism: plain, batch, gather.
    pub copies: [u64; 3],
    /// Time with a copy of the stream in flight, as the worker saw it.
    pub busy_ns: u64,
    /// Tickets in flight now.
    pub in_flight: u64,
}

/// All counters, of one instant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueueStats {
    /// Load-backs.
    pub load: StreamStats,
    /// Window loads.
    pub window: StreamStats,
    /// Stores.
    pub store: StreamStats,
    /// Hand-overs of steps.
    pub steps: u64,
    /// Time of all hand-overs on the caller's thread.
    pub handover_ns: u64,
    /// Longest of them.
    pub handover_max_ns: u64,
    /// Time at the gate of every model layer.
    pub gate_wait_ns: Vec<u64>,
    /// Jobs that failed.
    pub failures: u64,
    /// Jobs that were cancelled.
    pub cancels: u64,
    /// Waits that took too long, of the worker for a copy or of the engine for a gate.
    pub time_outs: u64,
    /// Jobs whose device work never ended: their pages are lost.
    pub unsettled: u64,
    /// Jobs without an outcome.
    pub outstanding: usize,
}

#[derive(Default)]
pub(super) struct Stats {
    all: QueueStats,
    busy_since_ns: [u64; 4],
}

impl Stats {
    pub(super) fn new(layers: usize) -> Self {
        let mut stats = Self::default();
        stats.all.gate_wait_ns = vec![0; layers];
        stats
    }

    pub(super) fn snapshot(&self, outstanding: usize) -> QueueStats {
        QueueStats {
            outstanding,
            ..self.all.clone()
        }
    }

    fn stream(&mut self, stream: Stream) -> &mut StreamStats {
        match stream {
            Stream::Load => &mut self.all.load,
            Stream::Window => &mut self.all.window,
            Stream::Store | Stream::Compute => &mut self.all.store,
        }
    }

    pub(super) fn handed_over(&mut self, ns: u64) {
        self.all.steps += 1;
        self.all.handover_ns += ns;
        self.all.handover_max_ns = self.all.handover_max_ns.max(ns);
    }

    pub(super) fn gate_waited(&mut self, model_layer: usize, ns: u64) {
        if let Some(wait) = self.all.gate_wait_ns.get_mut(model_layer) {
            *wait += ns;
        }
    }

    pub(super) fn copied(&mut self, stream: Stream, copies: usize, before: u64, after: u64) {
        let stream = self.stream(stream);
        stream.runs_before += before;
        stream.runs_after += after;
        stream.copies[copies] += 1;
    }

    pub(super) fn took_off(&mut self, stream: Stream, now_ns: u64) {
        let counters = self.stream(stream);
        counters.in_flight += 1;
        if counters.in_flight == 1 {
            self.busy_since_ns[stream.index()] = now_ns;
        }
    }

    pub(super) fn landed(&mut self, stream: Stream, bytes: u64, now_ns: u64) {
        let since = self.busy_since_ns[stream.index()];
        let counters = self.stream(stream);
        counters.bytes += bytes;
        counters.in_flight = counters.in_flight.saturating_sub(1);
        if counters.in_flight == 0 {
            counters.busy_ns += now_ns.saturating_sub(since);
        }
    }

    pub(super) fn job_over(&mut self, stream: Stream) {
        self.stream(stream).jobs += 1;
    }

    pub(super) fn failed(&mut self, settled: bool) {
        self.all.failures += 1;
        self.all.unsettled += u64::from(!settled);
    }

    pub(super) fn cancelled(&mut self) {
        self.all.cancels += 1;
    }

    pub(super) fn timed_out(&mut self) {
        self.all.time_outs += 1;
    }
}
