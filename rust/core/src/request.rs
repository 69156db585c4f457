//! A request: what the caller asks, where it stands, how it ended.

use std::sync::Arc;

use crate::ids::RequestId;
use crate::memory::Hit;
use crate::sampling::SamplingSpec;

/// Place in the order of service: class (HIGH only, under FCFS), then arrival. Never reused, so a
/// key also tells a request from a later one with the same id.
pub(crate) type Key = (PriorityClass, u64);

/// Class of a request. Under [`Policy::Priority`](crate::Policy) HIGH goes first. With pages and a
/// host tier a LOW request streams its KV instead of holding it on the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum PriorityClass {
    /// Interactive.
    #[default]
    High,
    /// Batch work.
    Low,
}

/// What a caller submits.
#[derive(Clone, Debug, Default)]
pub struct RequestSpec {
    /// The id, or `None` to be given one that is neither live nor has a stored result.
    pub id: Option<RequestId>,
    /// Prompt token ids; checked against the vocabulary at submit.
    pub prompt: Box<[u32]>,
    /// How to sample and when to stop.
    pub sampling: SamplingSpec,
    /// Priority class.
    pub class: PriorityClass,
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token or stop string.
    Stop,
    /// `max_tokens` generated, or the context is full.
    Length,
    /// Cancelled by the caller or by closing the engine.
    Abort,
    /// The forward failed.
    Error,
}

impl FinishReason {
    /// The name users see.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::Error => "error",
        }
    }
}

/// Monotonic times of the events of a request, in nanoseconds; `None` if it never happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stamps {
    /// Accepted by `submit`.
    pub submitted_ns: u64,
    /// First in a plan.
    pub first_planned_ns: Option<u64>,
    /// First token committed.
    pub first_token_ns: Option<u64>,
    /// Terminal result stored.
    pub finished_ns: Option<u64>,
}

/// How a request ended; exactly one exists per accepted id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestResult {
    /// The id.
    pub id: RequestId,
    /// Generated tokens, the stop token included.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub reason: FinishReason,
    /// The message of an error, or why it was aborted.
    pub message: Option<String>,
    /// Length of the prompt.
    pub prompt_len: usize,
    /// Prompt tokens that went through a forward; each counts once.
    pub computed_prompt_tokens: usize,
    /// Prompt tokens that did not, by where their KV came from.
    pub cached: Hit,
    /// Tokens computed again after a preemption or a failed copy.
    pub recomputed_tokens: usize,
    /// How often it was preempted.
    pub preemptions: u32,
    /// When things happened.
    pub stamps: Stamps,
}

/// Where a live request stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// In the queue; holds nothing.
    Waiting,
    /// In the queue again, with the tokens it has.
    Preempted,
    /// Has a slot; its prompt is being computed.
    Prefilling,
    /// One token a step.
    Decoding,
}

/// Answer of `poll` and `wait`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestStatus {
    /// Not finished yet.
    Live {
        /// Where it stands.
        phase: Phase,
        /// Tokens whose KV is computed.
        computed: usize,
        /// Tokens generated so far.
        tokens: Vec<u32>,
    },
    /// Finished, with its one result.
    Finished(Arc<RequestResult>),
}
