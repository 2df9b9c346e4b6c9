//! The frames of tables: a hypervisor gets back those that operations unlink.

use slat_capi::abi::{
    SLAT_ACCESSED, SLAT_DIRTY, SLAT_READ, SLAT_WRITE, slat_attributes, slat_execute, slat_format,
    slat_format_kind, slat_invalidation, slat_memory, slat_platform, slat_status,
};
use slat_capi::handle::{SLAT_SPACE_BYTES, slat_space};
use slat_capi::log::{slat_collapse, slat_complete, slat_split};
use slat_capi::space::{slat_create, slat_default_format, slat_destroy, slat_map};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::Cell;
use std::ffi::c_void;

const BLOCK: u64 = 2 << 20;
const BYTES: u64 = 4 * BLOCK;

unsafe extern "C" fn allocate(frames: *mut c_void, bytes: usize) -> u64 {
    // SAFETY: `frames` is the context, a counter.
    let frames = unsafe { &*frames.cast::<Cell<i64>>() };
    frames.set(frames.get() + 1);
    // SAFETY: the layout is not empty.
    unsafe { alloc_zeroed(Layout::from_size_align(bytes, bytes).unwrap()) as u64 }
}

unsafe extern "C" fn free(frames: *mut c_void, frame: u64, bytes: usize) {
    // SAFETY: `frames` is the context; `allocate` returned the frame, for these bytes.
    unsafe {
        let frames = &*frames.cast::<Cell<i64>>();
        frames.set(frames.get() - 1);
        dealloc(frame as *mut u8, Layout::from_size_align(bytes, bytes).unwrap());
    }
}

unsafe extern "C" fn phys_to_virt(_: *mut c_void, frame: u64) -> *mut c_void {
    frame as *mut c_void
}

unsafe extern "C" fn publish(_: *mut c_void) {}

unsafe extern "C" fn invalidate(_: *mut c_void, _: *const slat_invalidation) {}

#[test]
fn tables_a_collapse_unlinks_are_freed_once_it_is_completed() {
    for break_before_make in [0, 2] {
        let frames = Cell::new(0i64);
        let platform = slat_platform {
            context: (&raw const frames).cast_mut().cast(),
            allocate: Some(allocate),
            free: Some(free),
            phys_to_virt: Some(phys_to_virt),
            publish: Some(publish),
            invalidate: Some(invalidate),
            invalidate_local: None,
            maintain: None,
            break_before_make,
        };
        let mut space = Box::new(slat_space { bytes: [0; SLAT_SPACE_BYTES] });
        let space = &raw mut *space;
        let mut format = slat_format { kind: 0, flags: 0, output_bits: 0 };
        let kind = slat_format_kind::Arm64K4 as u32;
        let rights = slat_attributes {
            flags: SLAT_READ | SLAT_WRITE | SLAT_ACCESSED | SLAT_DIRTY,
            execute: slat_execute::None as u32,
            memory: slat_memory::Normal as u32,
        };
        // SAFETY: the storage is zero and stays; the platform keeps its promises, and no CPU loads
        // the root.
        unsafe {
            assert_eq!(slat_default_format(kind, &raw mut format), slat_status::Ok);
            let made = slat_create(space, &raw const platform, &raw const format, 1, 40);
            assert_eq!(made, slat_status::Ok);
            let mapped = slat_map(space, 0, BYTES, 0x4000_0000, rights, BLOCK);
            assert_eq!(mapped.status, slat_status::Ok);
            let before = frames.get();
            for round in 0..100 {
                let split = slat_split(space, 0, BYTES, 4096);
                assert_eq!((split.result.status, split.result.done), (slat_status::Ok, BYTES));
                assert_eq!(slat_complete(space, split.owed), slat_status::Ok);
                let collapsed = slat_collapse(space, 0, BYTES, BLOCK);
                assert_eq!((collapsed.result.done, frames.get()), (BYTES, before + 4), "{round}");
                assert_eq!(slat_complete(space, collapsed.owed), slat_status::Ok);
                assert_eq!(frames.get(), before, "round {round}, {break_before_make}");
            }
            // A call that completes what is owed gives them back as well.
            assert_eq!(slat_split(space, 0, BYTES, 4096).result.status, slat_status::Ok);
            assert_eq!(slat_collapse(space, 0, BYTES, BLOCK).result.done, BYTES);
            let mapped = slat_map(space, 0, BYTES, 0x4000_0000, rights, BLOCK);
            assert_eq!((mapped.status, frames.get()), (slat_status::Ok, before));
            assert_eq!(slat_destroy(space), slat_status::Ok);
        }
        assert_eq!(frames.get(), 0);
    }
}
