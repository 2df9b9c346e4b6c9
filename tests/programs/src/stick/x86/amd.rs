//! NPT.

use crate::{firmware, machine, pair, platform};

#[path = "../../npt/cases.rs"]
pub mod cases;
#[path = "../../npt/svm.rs"]
mod cpu;
#[path = "second.rs"]
pub mod second;
#[path = "times.rs"]
pub mod times;
#[path = "../../npt/wide.rs"]
pub mod wide;
