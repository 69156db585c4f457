//! How a copy job ends. Every job has exactly one outcome, delivered exactly once.

use std::fmt;

/// The one terminal state of a copy job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CopyOutcome {
    /// Every byte has arrived.
    Done,
    /// What it was to write is not valid; its source is unchanged.
    Failed(Box<CopyFailure>),
    /// Nothing was copied.
    Cancelled,
}

/// Why a job failed, and where, as far as it is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyFailure {
    /// The job.
    pub job: u64,
    /// First page (or state slot) on the device that did not arrive.
    pub page: Option<u32>,
    /// Name of the plane.
    pub plane: Option<String>,
    /// Layer of the model.
    pub layer: Option<u32>,
    /// What the device said.
    pub text: String,
    /// Whether the device has certainly stopped. If not (a copy that never ended), the job's pages
    /// may still be read or written and must not be handed out again.
    pub settled: bool,
}

impl CopyFailure {
    /// A failure of the whole job, with nothing left running.
    pub fn of(job: u64, text: impl Into<String>) -> Self {
        Self {
            job,
            page: None,
            plane: None,
            layer: None,
            text: text.into(),
            settled: true,
        }
    }
}

impl fmt::Display for CopyFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "copy job {}", self.job)?;
        if let Some(plane) = &self.plane {
            write!(f, ", plane {plane}")?;
        }
        if let Some(page) = self.page {
            write!(f, ", page {page}")?;
        }
        if let Some(layer) = self.layer {
            write!(f, ", layer {layer}")?;
        }
        write!(f, ": {}", self.text)
    }
}
