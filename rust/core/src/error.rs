//! Every way a call into the core can fail. All of them leave the state as it was.

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
    /// A page, or a snapshot slot, in a state the call does not allow.
    #[error("page {page}: {what}")]
    PageState {
        /// The page.
        page: u32,
        /// What is wrong with it.
        what: &'static str,
    },
    /// The scheduler was closed.
    #[error("engine is closed: {reason}")]
    Closed {
        /// Why.
        reason: String,
    },
}

impl Error {
    pub(crate) fn config(
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

    pub(crate) fn request(
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
