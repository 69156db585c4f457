//! The only place of the workspace that reads the clock.
#![allow(
    clippy::disallowed_methods,
    reason = "this module is the one door to the clock"
)]

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Nanoseconds since the first call in this process; never goes back. Wraps after 584 years.
pub fn monotonic_ns() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    let elapsed = START.get_or_init(Instant::now).elapsed();
    u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX)
}

/// The end of a wait: a point in time, or never.
#[derive(Clone, Copy, Debug)]
pub struct Deadline(Option<Instant>);

impl Deadline {
    /// `timeout` from now; `None`, or a time too far to represent, is never.
    pub fn after(timeout: Option<Duration>) -> Self {
        Self(timeout.and_then(|t| Instant::now().checked_add(t)))
    }

    /// Time left, at most `slice`; zero once the deadline has passed.
    pub fn slice(&self, slice: Duration) -> Duration {
        self.0.map_or(slice, |end| {
            end.saturating_duration_since(Instant::now()).min(slice)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clock_does_not_go_back() {
        let first = monotonic_ns();
        assert!(monotonic_ns() >= first);
    }

    #[test]
    fn slice_is_bounded_by_the_deadline_and_zero_after_it() {
        let slice = Duration::from_millis(50);
        assert_eq!(Deadline::after(None).slice(slice), slice);
        assert_eq!(Deadline::after(Some(Duration::MAX)).slice(slice), slice);
        assert_eq!(
            Deadline::after(Some(Duration::ZERO)).slice(slice),
            Duration::ZERO
        );
    }
}
