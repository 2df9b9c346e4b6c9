//! EPT.

use crate::{firmware, machine, pair, platform};

#[path = "../../npt/cases.rs"]
pub mod cases;
#[path = "../../ept/vmx.rs"]
mod cpu;
#[path = "../../ept/maps.rs"]
pub mod maps;
#[path = "second.rs"]
pub mod second;
#[path = "times.rs"]
pub mod times;
