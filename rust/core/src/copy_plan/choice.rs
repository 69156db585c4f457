//! Which mechanism moves a job's bytes, chosen by the mean length of its runs.

/// How a device moves the runs of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mechanism {
    /// One copy call a run.
    Plain,
    /// All runs in one call of the copy engine.
    Batch,
    /// A kernel that walks the pieces, all planes of a piece together.
    Gather,
}

impl Mechanism {
    /// Name in statistics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Batch => "batch",
            Self::Gather => "gather",
        }
    }
}

/// Mean run lengths from which a mechanism pays, measured by the device at start-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thresholds {
    /// At least this many bytes a run: [`Mechanism::Plain`].
    pub plain_bytes: u64,
    /// At least this many: [`Mechanism::Batch`]; `None` where there is no batch call.
    pub batch_bytes: Option<u64>,
}

impl Thresholds {
    /// The mechanism for `runs` runs of `bytes` in all.
    pub fn choose(&self, bytes: u64, runs: u64) -> Mechanism {
        let mean = bytes / runs.max(1);
        if mean >= self.plain_bytes {
            Mechanism::Plain
        } else if self.batch_bytes.is_some_and(|least| mean >= least) {
            Mechanism::Batch
        } else {
            Mechanism::Gather
        }
    }
}
