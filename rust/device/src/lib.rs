//! What the engine needs of the machine: the monotonic clock. `headrace-core` never reads time
//! itself, it is handed in.
#![forbid(unsafe_code)]

mod clock;

pub use clock::{Deadline, monotonic_ns};
