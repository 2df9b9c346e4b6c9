//! vCPUs that switch their caches, on real tables, over a model of memory and of the caches in
//! front of it that takes every liberty the architecture gives: what each policy loses, and what it
//! costs.

#[path = "caches/model.rs"]
mod model;
#[path = "caches/vm.rs"]
mod vm;

#[path = "caches/cost.rs"]
mod cost;
#[path = "caches/scenarios.rs"]
mod scenarios;
#[path = "caches/table.rs"]
mod table;
#[path = "caches/views.rs"]
mod views;
