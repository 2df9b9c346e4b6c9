//! What does not compile, and the program of the README, which does.
//!
//! A caller cannot read the memory behind an unmapped leaf before the invalidation has completed:
//! ```
//! # use slat::*;
//! fn memory<F: Format, P: Platform>(batch: &mut UnmapBatch<'_, '_, F, P>) -> Option<Hpa> {
//!     batch.complete().next().map(|leaves| leaves.hpa)
//! }
//! ```
//! ```compile_fail,E0616
//! # use slat::*;
//! fn memory<F: Format, P: Platform>(batch: &mut UnmapBatch<'_, '_, F, P>) -> Option<Hpa> {
//!     batch.storage[0].0.map(|leaves| leaves.hpa)
//! }
//! ```
//! ```compile_fail,E0616
//! # use slat::*;
//! fn memory(storage: &[UnmapEntry]) -> Option<Hpa> {
//!     storage[0].0.map(|leaves| leaves.hpa)
//! }
//! ```
//! A caller cannot free live tables. It can free unloaded ones, and to unload tables it
//! promises that no CPU has them loaded:
//! ```
//! # use slat::*;
//! fn end<F: Format, P: Platform>(tables: UnloadedTables<'_, F, P>) {
//!     tables.destroy();
//! }
//! ```
//! ```compile_fail,E0599
//! # use slat::*;
//! fn end<F: Format, P: Platform>(tables: Tables<'_, F, P>) {
//!     tables.destroy();
//! }
//! ```
//! ```compile_fail,E0133
//! # use slat::*;
//! fn end<F: Format, P: Platform>(tables: Tables<'_, F, P>) {
//!     tables.deactivate().destroy();
//! }
//! ```
//! A caller cannot free tables while any thread is inside them:
//! ```compile_fail,E0505
//! # use slat::*;
//! fn end<F: Format, P: Platform>(tables: Tables<'_, F, P>, reader: &mut Reader<'_, P>) {
//!     let walker = tables.enter(reader).unwrap();
//!     // SAFETY: no CPU has the root loaded.
//!     unsafe { tables.deactivate() }.destroy();
//!     walker.dump();
//! }
//! ```
//! A guard cannot refresh, and so let its tables go, while a reservation holds one of their
//! entries:
//! ```
//! # use slat::*;
//! fn fault<F: Format, P: Platform>(
//!     guard: &mut Guard<'_, '_, F, P>,
//!     cache: &mut TableCache<'_, F, P>,
//! ) {
//!     let entry = guard.reserve(Gpa(0), PageSize::SIZE_4K, cache).unwrap();
//!     entry.commit(Hpa(0), Attributes::RAM).unwrap();
//!     guard.refresh();
//! }
//! ```
//! ```compile_fail,E0499
//! # use slat::*;
//! fn fault<F: Format, P: Platform>(
//!     guard: &mut Guard<'_, '_, F, P>,
//!     cache: &mut TableCache<'_, F, P>,
//! ) {
//!     let entry = guard.reserve(Gpa(0), PageSize::SIZE_4K, cache).unwrap();
//!     guard.refresh();
//!     entry.commit(Hpa(0), Attributes::RAM).unwrap();
//! }
//! ```
//! Only the engine gives a table page back to the platform: a [`Frame`] cannot be copied, nor taken
//! out of a cache or a table.
//! ```compile_fail,E0599
//! # use slat::*;
//! fn twice(frame: Frame) -> (Frame, Frame) {
//!     (frame.clone(), frame)
//! }
//! ```

/// The README.
#[doc = include_str!("../README.md")]
struct Readme;
