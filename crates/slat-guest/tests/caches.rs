//! vCPUs that switch their caches, on real tables and a model of memory and its caches. The model
//! does everything that the architecture allows. The tests find what each policy loses, and what it
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
