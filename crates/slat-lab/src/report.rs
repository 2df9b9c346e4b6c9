//! Reports of a run, for people and for programs.

pub mod charts;
pub mod comparison;
pub mod html;
pub mod json;
pub mod markdown;
pub mod tables;
pub mod text;
