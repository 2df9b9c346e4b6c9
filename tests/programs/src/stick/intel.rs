//! EPT.

use super::{firmware, machine, platform};

#[path = "../npt/cases.rs"]
pub mod cases;
#[path = "../ept/vmx.rs"]
mod cpu;
#[path = "../ept/maps.rs"]
mod maps;
#[path = "pair.rs"]
pub mod pair;
#[path = "times.rs"]
pub mod times;
