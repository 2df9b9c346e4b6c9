//! Reports of a run, for people and for programs.

pub mod charts;
pub mod comparison;
pub mod csv;
pub mod html;
pub mod json;
pub mod ktap;
pub mod markdown;
pub mod merged;
pub mod plan;
pub mod tables;
pub mod text;
