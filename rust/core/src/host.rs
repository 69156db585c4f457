//! Index of a page in host memory.

/// A page of the host pool, 0-based.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostPage(pub u32);
