//! What a VMM needs besides the services: parts that own what they use, guests that do not wait for
//! each other, many guests, large guests.
#![cfg(not(loom))]

#[path = "embed/alone.rs"]
mod alone;
#[path = "embed/events.rs"]
mod events;
#[path = "embed/forwards.rs"]
mod forwards;
#[path = "embed/held_up.rs"]
mod held_up;
#[cfg(not(miri))]
#[path = "embed/lock_file.rs"]
mod lock_file;
#[path = "embed/machine.rs"]
mod machine;
#[path = "embed/misuse.rs"]
mod misuse;
#[path = "embed/panics.rs"]
mod panics;
#[path = "embed/pieces.rs"]
mod pieces;
#[path = "embed/scale.rs"]
mod scale;
#[path = "embed/shared.rs"]
mod shared;
#[cfg(debug_assertions)]
#[path = "embed/waits.rs"]
mod waits;
