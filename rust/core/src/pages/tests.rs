#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a helper of a test fails by panicking, as a test does"
)]

use super::*;

mod example;
mod machine;
mod model;
mod unit;

/// Layers of owned and free pages add up to those of the pool (I6).
fn conserves_layers(pages: &PageAllocator) {
    let (config, stats) = (pages.config(), pages.stats());
    let slots =
        |class: ClassStats| class.request + class.tree + class.copy + class.pending + class.partial;
    let layers = config.num_layers as usize;
    let waste = stats.waste_layers as usize * stats.low.used as usize;
    let low = slots(stats.low) * config.slot_widths as usize + waste;
    let all = slots(stats.high) * layers + low + stats.free as usize * layers;
    assert_eq!(all, layers * config.num_pages as usize, "{stats:?}");
}
