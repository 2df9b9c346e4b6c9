//! What a VMM's author asks of a guest's memory beyond what it does: parts that own, guests that do
//! not wait for each other, many of them, large ones.
#![cfg(not(loom))]

#[path = "embed/alone.rs"]
mod alone;
#[path = "embed/events.rs"]
mod events;
#[path = "embed/machine.rs"]
mod machine;
#[path = "embed/pieces.rs"]
mod pieces;
#[path = "embed/scale.rs"]
mod scale;
#[path = "embed/shared.rs"]
mod shared;
