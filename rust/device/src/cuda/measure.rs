//! From which run length which mechanism pays: measured once a device and driver, then remembered.
//!
//! Copies to the device are timed from the call to the end, with what the caller pays for
//! submission in it; the way back is within 15 % of it at every size. No locks.

use std::fs;
use std::path::{Path, PathBuf};

use headrace_core::{Mechanism, Result, Thresholds};

use super::context::{Context, Entered};
use super::driver::Handle;
use super::paths::{PIECE_BYTES, Paths, Span};
use crate::clock::monotonic_ns;

/// Run lengths that are timed.
const SIZES: [u64; 4] = [1 << 16, 1 << 18, 1 << 20, 1 << 22];
/// Bytes of one timed transfer. The GPU of a test moves them in this process.
const TOTAL: u64 = if cfg!(test) { 4 << 20 } else { 16 << 20 };
const TRIES: u32 = 3;
/// No further size is begun after this. A test does not depend on the time it takes.
const BUDGET_NS: u64 = if cfg!(test) {
    3_600_000_000_000
} else {
    150_000_000
};
/// The copy engine may be slower than the kernel by this much: it takes no processors.
const BATCH_WORTH_PERCENT: u64 = 120;
/// One call a run is simplest where it costs next to nothing.
const PLAIN_WORTH_PERCENT: u64 = 105;
/// Where no measured length says so: a run takes 0.6 ms of link, its call a few microseconds.
const PLAIN_BYTES: u64 = 32 << 20;

/// Nanoseconds that [`TOTAL`] bytes in runs of one length took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sample {
    pub(super) run_bytes: u64,
    pub(super) plain_ns: u64,
    pub(super) batch_ns: Option<u64>,
    pub(super) gather_ns: u64,
}

/// The least lengths from which on a mechanism pays at every longer length measured.
pub(super) fn choose(samples: &[Sample]) -> Thresholds {
    let within = |ns: u64, percent: u64, of: u64| {
        u128::from(ns) * 100 <= u128::from(of) * u128::from(percent)
    };
    let batch_pays = |s: &Sample| {
        s.batch_ns
            .is_some_and(|ns| within(ns, BATCH_WORTH_PERCENT, s.gather_ns))
    };
    let plain_pays = |s: &Sample| match s.batch_ns {
        Some(batch_ns) => {
            let best = if batch_pays(s) { batch_ns } else { s.gather_ns };
            within(s.plain_ns, PLAIN_WORTH_PERCENT, best)
        }
        None => within(s.plain_ns, BATCH_WORTH_PERCENT, s.gather_ns),
    };
    Thresholds {
        plain_bytes: least(samples, plain_pays).unwrap_or(PLAIN_BYTES),
        batch_bytes: least(samples, batch_pays),
    }
}

fn least(samples: &[Sample], pays: impl Fn(&Sample) -> bool) -> Option<u64> {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable_by_key(|sample| std::cmp::Reverse(sample.run_bytes));
    let paying = sorted.iter().take_while(|sample| pays(sample));
    paying.last().map(|sample| sample.run_bytes)
}

/// The thresholds of the device, from the folder `cache` or measured now. A folder that cannot be
/// read or written costs the measurement, no more.
pub(super) fn thresholds(
    context: &Context,
    paths: &Paths,
    stream: Handle,
    cache: Option<&Path>,
) -> Result<Thresholds> {
    let file = match cache {
        None => None,
        Some(folder) => Some(file_in(folder, &context.identity()?)),
    };
    let text = file.as_ref().and_then(|file| fs::read_to_string(file).ok());
    if let Some(known) = text.as_deref().and_then(parse) {
        return Ok(known);
    }
    let samples = measure(context, paths, stream)?;
    let chosen = choose(&samples);
    // What a busy machine cut short is good enough for this process, and no more.
    if let Some(file) = file.filter(|_| samples.len() == SIZES.len()) {
        let _ = write(&file, &chosen);
    }
    Ok(chosen)
}

/// File of a GPU's name and a driver's version.
pub(super) fn file_in(folder: &Path, (name, driver): &(String, i32)) -> PathBuf {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    let name: String = name.chars().map(plain).collect();
    folder.join(format!("copies-{name}-{driver}.txt"))
}

/// `plain_bytes N` and `batch_bytes N`, or `none`.
pub(super) fn parse(text: &str) -> Option<Thresholds> {
    let mut lines = text.lines();
    let plain = lines.next()?.strip_prefix("plain_bytes ")?.parse().ok()?;
    let batch_bytes = match lines.next()?.strip_prefix("batch_bytes ")? {
        "none" => None,
        bytes => Some(bytes.parse().ok()?),
    };
    Some(Thresholds {
        plain_bytes: plain,
        batch_bytes,
    })
}

pub(super) fn format(thresholds: &Thresholds) -> String {
    let batch = thresholds.batch_bytes.map(|bytes| bytes.to_string());
    let batch = batch.as_deref().unwrap_or("none");
    format!(
        "plain_bytes {}\nbatch_bytes {batch}\n",
        thresholds.plain_bytes
    )
}

/// Under its name complete or not at all.
fn write(file: &Path, thresholds: &Thresholds) -> std::io::Result<()> {
    if let Some(folder) = file.parent() {
        fs::create_dir_all(folder)?;
    }
    let whole = file.with_extension(std::process::id().to_string());
    fs::write(&whole, format(thresholds))?;
    fs::rename(&whole, file)
}

/// Memory of both sides, freed when dropped.
struct Buffers<'a> {
    entered: &'a Entered<'a>,
    host: u64,
    mapped: u64,
    device: u64,
}

impl<'a> Buffers<'a> {
    fn new(entered: &'a Entered<'a>) -> Result<Self> {
        let bytes = usize::try_from(TOTAL).unwrap_or(usize::MAX);
        let device = entered.new_memory(bytes)?;
        let pinned = entered.new_pinned(bytes);
        let (host, mapped) = pinned.inspect_err(|_| entered.free_memory(device))?;
        Ok(Self {
            entered,
            host,
            mapped,
            device,
        })
    }

    /// Runs of `run_bytes`, in another order on either side, in spans of at most `most` bytes.
    fn spans(&self, run_bytes: u64, most: u64) -> Vec<Span> {
        let runs = TOTAL / run_bytes;
        let span_bytes = run_bytes.min(most);
        let cuts = move |run: u64| (0..run_bytes / span_bytes).map(move |cut| (run, cut));
        let all = (0..runs).flat_map(cuts);
        all.map(|(run, cut)| {
            // Odd, and the number of runs a power of two: a permutation.
            let source = run * 5 % runs * run_bytes + cut * span_bytes;
            Span {
                host: self.host + source,
                mapped: self.mapped + source,
                device: self.device + run * run_bytes + cut * span_bytes,
                bytes: span_bytes,
            }
        })
        .collect()
    }
}

impl Drop for Buffers<'_> {
    fn drop(&mut self) {
        self.entered.free_pinned(self.host);
        self.entered.free_memory(self.device);
    }
}

fn measure(context: &Context, paths: &Paths, stream: Handle) -> Result<Vec<Sample>> {
    let start_ns = monotonic_ns();
    let entered = context.enter()?;
    let buffers = Buffers::new(&entered)?;
    let time = |how: Mechanism, run_bytes: u64| -> Result<u64> {
        let gather = how == Mechanism::Gather;
        let spans = buffers.spans(run_bytes, if gather { PIECE_BYTES } else { u64::MAX });
        let mut best = u64::MAX;
        for _ in 0..TRIES {
            let begin_ns = monotonic_ns();
            let sent = paths.send(&entered, stream, how, true, &spans);
            // Also after a refusal: what was enqueued must be over before the buffers go.
            entered.synchronize(stream)?;
            if let Some(refused) = sent?.refused {
                return Err(refused);
            }
            best = best.min(monotonic_ns() - begin_ns);
        }
        Ok(best)
    };
    let mut samples = Vec::new();
    // The longest first: what a budget that ends early leaves out is the end that gather serves.
    for run_bytes in SIZES.into_iter().rev() {
        if !samples.is_empty() && monotonic_ns() - start_ns > BUDGET_NS {
            break;
        }
        samples.push(Sample {
            run_bytes,
            plain_ns: time(Mechanism::Plain, run_bytes)?,
            batch_ns: context
                .has_batch()
                .then(|| time(Mechanism::Batch, run_bytes))
                .transpose()?,
            gather_ns: time(Mechanism::Gather, run_bytes)?,
        });
    }
    Ok(samples)
}
