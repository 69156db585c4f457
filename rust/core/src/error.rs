//! Every way a call into the core can fail. All of them leave the state as it was.

use crate::copy_job::CopyFailure;
use crate::ids::{Epoch, RequestId};

/// `Result` with the errors of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Failure of a call; nothing has changed when one is returned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A setting that cannot work.
    #[error("{field} = {value}: {expected}")]
    Config {
        /// Name of the setting.
        field: &'static str,
        /// What was given.
        value: String,
        /// What would be accepted.
        expected: String,
    },
    /// A request field that cannot work.
    #[error("{field} = {value}: {expected}")]
    InvalidRequest {
        /// Name of the field.
        field: &'static str,
        /// What was given.
        value: String,
        /// What would be accepted.
        expected: String,
    },
    /// The prompt leaves no room for one generated token.
    #[error(
        "prompt of {prompt_tokens} tokens does not fit: max_context is {max_context}, of which one \
         token must stay free for generation; shorten the prompt or raise max_context"
    )]
    PromptTooLong {
        /// Length of the prompt.
        prompt_tokens: usize,
        /// Tokens of context a request can have.
        max_context: usize,
    },
    /// The id is live, or still holds a slot.
    #[error("request {} is already live", id.0)]
    DuplicateRequest {
        /// The id.
        id: RequestId,
    },
    /// The id is not live, has no slot or no stored result.
    #[error("request {} is unknown", id.0)]
    UnknownRequest {
        /// The id.
        id: RequestId,
    },
    /// Every slot is taken, or waits for a step in flight.
    #[error(
        "OutOfPages: {needed} slot needed, {free} free of {total}; free a slot or raise \
         max_batch_size"
    )]
    OutOfSlots {
        /// Slots asked for.
        needed: u32,
        /// Slots free now.
        free: u32,
        /// Slots in the table.
        total: u32,
    },
    /// The page pool has no room for a call.
    #[error(
        "OutOfPages: {}{needed} pages needed, {free} free, {evictable} evictable; free pages, ask \
         for fewer or use a larger pool",
        item.map(|item| format!("item {item}: ")).unwrap_or_default()
    )]
    OutOfPages {
        /// Pages asked for.
        needed: usize,
        /// Pages the call could have got.
        free: usize,
        /// Pages that eviction could add.
        evictable: usize,
        /// Which item of a group call failed.
        item: Option<usize>,
    },
    /// A page that is not in the state the call needs.
    #[error("page {page} start {start} (number {index} of the call): {fault}")]
    PageState {
        /// Position in the call of the first bad page.
        index: usize,
        /// Its raw page.
        page: u32,
        /// Its first layer.
        start: u32,
        /// What is wrong with it.
        fault: &'static str,
    },
    /// A host page or snapshot in a state the call does not allow.
    #[error("host page {page}: {fault}")]
    HostPageState {
        /// The page.
        page: u32,
        /// What is wrong with it.
        fault: &'static str,
    },
    /// Back-pressure: the waiting queue is full.
    #[error("queue is full: {waiting} requests wait, max_waiting is {max_waiting}; submit later")]
    QueueFull {
        /// Requests waiting now.
        waiting: usize,
        /// Limit.
        max_waiting: usize,
    },
    /// A commit for a step that is not in flight.
    #[error("plan {} is not in flight", epoch.0)]
    StalePlan {
        /// Epoch of the plan that was committed.
        epoch: Epoch,
    },
    /// A copy failed or did not end in time. What it was to write is not valid.
    #[error("{0}")]
    Copy(Box<CopyFailure>),
    /// The driver of a device refused a call.
    #[error("{call}: {text}")]
    Device {
        /// Name of the call.
        call: &'static str,
        /// What the driver said.
        text: String,
    },
    /// Back-pressure: as many copy jobs live as may.
    #[error("copy queue is full: {live} jobs live, {asked} more asked for, max_jobs is {max_jobs}")]
    CopyQueueFull {
        /// Jobs without an outcome.
        live: usize,
        /// Jobs that were to be added.
        asked: usize,
        /// Limit.
        max_jobs: usize,
    },
    /// The machine, or the control group of the process, has less memory than asked for.
    #[error(
        "OutOfPages: host memory of {needed} bytes asked for, {available} bytes available \
         ({source_name}), {} bytes short; lower the host budget",
        needed - available
    )]
    OutOfHostMemory {
        /// Bytes asked for.
        needed: u64,
        /// Bytes that could be had.
        available: u64,
        /// What sets the limit.
        source_name: &'static str,
    },
    /// The scheduler was closed.
    #[error("engine is closed: {reason}")]
    Closed {
        /// Why.
        reason: String,
    },
}

impl Error {
    /// A setting that cannot work.
    pub fn config(
        field: &'static str,
        value: impl std::fmt::Display,
        expected: impl Into<String>,
    ) -> Self {
        Self::Config {
            field,
            value: value.to_string(),
            expected: expected.into(),
        }
    }

    /// The same failure, of item `item` of a group call.
    pub(crate) fn of_item(mut self, at: usize) -> Self {
        if let Self::OutOfPages { item, .. } = &mut self {
            *item = Some(at);
        }
        self
    }

    /// A request field that cannot work.
    pub fn request(
        field: &'static str,
        value: impl std::fmt::Display,
        expected: impl Into<String>,
    ) -> Self {
        Self::InvalidRequest {
            field,
            value: value.to_string(),
            expected: expected.into(),
        }
    }
}
