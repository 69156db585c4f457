//! Settings of the KV memory, checked once.

use crate::error::{Error, Result};
use crate::pages::PageConfig;
use crate::scheduler::CHUNK_ALIGN;
use crate::tree::WritePolicy;

/// When a waiting request may start.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Admission {
    /// When the worst case of every running request and its own fits: never fails later.
    Reserve,
    /// When the predicted peak fits, each request taken to generate `ratio` of its `max_tokens`;
    /// a wrong prediction ends in preemption.
    Estimate {
        /// In (0, 1].
        ratio: f64,
    },
}

/// What becomes of the KV of a preempted request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preemption {
    /// Dropped; on resume the prompt is prefilled and the generated tokens are replayed as decode
    /// steps, so that the bits are those of an undisturbed run.
    #[default]
    Recompute,
    /// Copied to the host tier and loaded back; recomputed if the host tier is full.
    Park,
}

/// How much a step may stream from the host for LOW rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StreamBudget {
    /// Bytes the link moves in a millisecond.
    pub bytes_per_ms: f64,
    /// Predicted time of the HIGH part of a step: this,
    pub high_ms_base: f64,
    /// plus this per decode row,
    pub high_ms_per_row: f64,
    /// plus this per prefill token.
    pub high_ms_per_token: f64,
    /// Part of the link that streaming may plan with; in (0, 1].
    pub eta: f64,
    /// How much longer LOW work may make a HIGH step; at least 1.
    pub rho: f64,
    /// Streaming time of a step without HIGH rows.
    pub low_step_ms: f64,
    /// After this many steps in which it was deferred, a LOW row runs whatever it streams.
    pub low_max_wait_steps: u32,
}

impl Default for StreamBudget {
    fn default() -> Self {
        Self {
            bytes_per_ms: 50e6,
            high_ms_base: 5.0,
            high_ms_per_row: 0.1,
            high_ms_per_token: 0.02,
            eta: 0.9,
            rho: 1.05,
            low_step_ms: 100.0,
            low_max_wait_steps: 64,
        }
    }
}

/// Layout and tiers of the KV memory. `Default`: fixed slots, nothing is cached.
#[derive(Clone, Debug)]
pub struct MemoryConfig {
    /// Tokens of a page, of the prefix tree and of the host tier in either layout.
    pub page_size: u32,
    /// Device pages; `None` is fixed slots.
    pub pages: Option<PageConfig>,
    /// Whether prefixes are kept and reused.
    pub prefix_cache: bool,
    /// When pages are stored to the host.
    pub policy: WritePolicy,
    /// Pages of the host tier; 0 is none.
    pub host_pages: u32,
    /// Snapshots the host tier has room for, and buffers on the device in which a snapshot waits
    /// for its copy. Hybrid models only.
    pub snapshots: u32,
    /// See `snapshots`.
    pub staging: u32,
    /// State slots of requests; those of the buffers come after them.
    pub state_slots: u32,
    /// Whether requests carry a linear-attention state.
    pub hybrid: bool,
    /// Tokens between snapshots of a long prompt.
    pub snapshot_interval: u32,
    /// Bytes of KV of one page over all layers.
    pub page_bytes: u64,
    /// Admission mode.
    pub admission: Admission,
    /// Preemption mode.
    pub preemption: Preemption,
    /// Test switch: preempt a request every so many steps; 0 is never.
    pub preempt_every: u64,
    /// Host hits of fewer pages are recomputed instead of loaded.
    pub load_back_threshold: u32,
    /// Budget of LOW rows.
    pub stream: StreamBudget,
}

impl Default for MemoryConfig {
    fn default() -> Self {
        Self {
            page_size: 64,
            pages: None,
            prefix_cache: false,
            policy: WritePolicy::WriteThrough,
            host_pages: 0,
            snapshots: 0,
            staging: 0,
            state_slots: 0,
            hybrid: false,
            snapshot_interval: 4096,
            page_bytes: 0,
            admission: Admission::Estimate { ratio: 0.5 },
            preemption: Preemption::Recompute,
            preempt_every: 0,
            load_back_threshold: 1,
            stream: StreamBudget::default(),
        }
    }
}

impl MemoryConfig {
    pub(crate) fn validate(&self) -> Result<()> {
        if !self.page_size.is_power_of_two() || (self.page_size as usize) < CHUNK_ALIGN {
            let expected = format!("a power of two, at least {CHUNK_ALIGN}");
            return Err(Error::config("page_size", self.page_size, expected));
        }
        if let Some(pages) = &self.pages
            && pages.page_size != self.page_size
        {
            let expected = format!("the page size of the tree, {}", self.page_size);
            return Err(Error::config("pages.page_size", pages.page_size, expected));
        }
        if let Admission::Estimate { ratio } = self.admission
            && !(ratio > 0.0 && ratio <= 1.0)
        {
            return Err(Error::config(
                "admission.ratio",
                ratio,
                "a number in (0, 1]",
            ));
        }
        if self.snapshot_interval == 0 || !self.snapshot_interval.is_multiple_of(self.page_size) {
            let expected = format!("a positive multiple of page_size {}", self.page_size);
            return Err(Error::config(
                "snapshot_interval",
                self.snapshot_interval,
                expected,
            ));
        }
        let stream = &self.stream;
        let checks = [
            (
                "stream.bytes_per_ms",
                stream.bytes_per_ms,
                stream.bytes_per_ms > 0.0,
            ),
            (
                "stream.high_ms_base",
                stream.high_ms_base,
                stream.high_ms_base >= 0.0,
            ),
            (
                "stream.high_ms_per_row",
                stream.high_ms_per_row,
                stream.high_ms_per_row >= 0.0,
            ),
            (
                "stream.high_ms_per_token",
                stream.high_ms_per_token,
                stream.high_ms_per_token >= 0.0,
            ),
            (
                "stream.eta",
                stream.eta,
                stream.eta > 0.0 && stream.eta <= 1.0,
            ),
            ("stream.rho", stream.rho, stream.rho >= 1.0),
            (
                "stream.low_step_ms",
                stream.low_step_ms,
                stream.low_step_ms > 0.0,
            ),
        ];
        for (field, value, good) in checks {
            if !good || !value.is_finite() {
                let expected = "a finite number in range (rates and times positive, eta in \
                                (0, 1], rho at least 1)";
                return Err(Error::config(field, value, expected));
            }
        }
        Ok(())
    }
}
