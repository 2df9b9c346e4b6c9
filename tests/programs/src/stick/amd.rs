//! NPT.

use super::{firmware, machine, platform};

#[path = "../npt/cases.rs"]
pub mod cases;
#[path = "../npt/svm.rs"]
mod cpu;
#[path = "pair.rs"]
pub mod pair;
#[path = "times.rs"]
pub mod times;
