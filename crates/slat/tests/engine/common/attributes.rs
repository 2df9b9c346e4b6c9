//! Attributes, for tests of formats here and beside the formats.

use super::{Attributes, Execute, Memory, Software};

/// Attributes in every combination, with the first two software bits.
pub fn all_attributes() -> impl Iterator<Item = Attributes> {
    let memories = [Memory::Normal, Memory::NonCacheable, Memory::Device, Memory::DeviceStrict];
    let executes = [Execute::All, Execute::None, Execute::User, Execute::Kernel];
    (0..1024usize).map(move |n| Attributes {
        read: n & 1 != 0,
        write: n & 2 != 0,
        accessed: n & 4 != 0,
        dirty: n & 8 != 0,
        software: Software::new(n & 16 != 0, n & 512 != 0),
        execute: executes[n >> 5 & 3],
        memory: memories[n >> 7 & 3],
    })
}
