//! Platforms around a machine.

/// Writes methods of [`slat::Platform`] that are those of a field, for a platform around a machine
/// of this crate: `forward!(machine: allocate free entries)`, or all with `forward!(machine)`.
/// Where the platform's other methods only observe, it keeps the contract as the machine does.
#[macro_export]
macro_rules! forward {
    ($field:ident) => {
        $crate::forward!(
            $field: allocate free entries publish invalidate invalidate_local break_before_make
            readers maintain fill
        );
    };
    ($field:ident: $($method:ident)*) => {
        $($crate::forward!(@$method $field);)*
    };
    (@allocate $field:ident) => {
        fn allocate(&self, bytes: usize) -> Option<::slat::Frame> {
            self.$field.allocate(bytes)
        }
    };
    (@free $field:ident) => {
        unsafe fn free(&self, frame: ::slat::Frame, bytes: usize) {
            // SAFETY: by the contract of this function.
            unsafe { self.$field.free(frame, bytes) }
        }
    };
    (@entries $field:ident) => {
        fn entries(&self, table: ::slat::Hpa) -> ::core::ptr::NonNull<::slat::Pte> {
            self.$field.entries(table)
        }
    };
    (@publish $field:ident) => {
        fn publish(&self) {
            self.$field.publish();
        }
    };
    (@invalidate $field:ident) => {
        fn invalidate(&self, what: &::slat::Invalidation) {
            self.$field.invalidate(what);
        }
    };
    (@invalidate_local $field:ident) => {
        fn invalidate_local(&self, what: &::slat::Invalidation) {
            self.$field.invalidate_local(what);
        }
    };
    (@break_before_make $field:ident) => {
        fn break_before_make(&self) -> ::slat::BreakBeforeMake {
            self.$field.break_before_make()
        }
    };
    (@readers $field:ident) => {
        fn readers(&self) -> &::slat::Readers {
            self.$field.readers()
        }
    };
    (@maintain $field:ident) => {
        fn maintain(&self, memory: ::slat::Hpa, bytes: u64, what: ::slat::Maintenance) {
            self.$field.maintain(memory, bytes, what);
        }
    };
    (@fill $field:ident) => {
        fn fill(&self, entries: &mut [::slat::Pte], first: u64, step: u64) {
            self.$field.fill(entries, first, step);
        }
    };
}
