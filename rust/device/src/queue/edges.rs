//! The edges of the protocol by name, so that a test can leave one out and see that it is needed.

/// What orders two things.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Edge {
    /// The forward waits for the ticket of a load-back's layer.
    LoadReady,
    /// The forward waits for the ticket of a window's layer.
    WindowReady,
    /// A gate opens only when its copies are submitted.
    GateClosed,
    /// A window load is enqueued only once the ticket of its buffer's last reader is recorded.
    ConsumedRecorded,
    /// The window stream waits for that ticket.
    ConsumedWait,
    /// The first loads of a step wait for the last readers of the step before.
    ConsumedAcross,
    /// A store waits for the ticket given with it.
    StoreAfter,
    /// A job is terminal only when its last ticket is over.
    OutcomeAfterTicket,
    /// A failed copy makes its job fail.
    FailureReported,
    /// A refused submission makes its job fail.
    RefusalReported,
    /// A failed job opens its gates.
    FailureOpensGates,
    /// A job that names a page lost to a copy that never ended is not submitted.
    LostPages,
    /// A job is cancelled only before it is submitted.
    CancelBeforeSubmit,
}

/// All edges, less the one that a test leaves out.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Edges {
    #[cfg(test)]
    pub(crate) missing: Option<Edge>,
}

impl Edges {
    #[cfg(test)]
    pub(crate) fn keeps(self, edge: Edge) -> bool {
        self.missing != Some(edge)
    }

    #[cfg(not(test))]
    #[expect(clippy::unused_self, reason = "the test build looks")]
    pub(crate) fn keeps(self, _: Edge) -> bool {
        true
    }
}
