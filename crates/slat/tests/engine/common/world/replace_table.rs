//! A leaf in place of a table.

use super::super::Event;
use super::super::hardware::Hardware;
use super::shape::{maintained, maintenance};
use super::{Mapping, World, floor, invalidations, owes, size};
use slat::{Gpa, Hpa, MapError};

impl<H: Hardware> World<'_, H> {
    /// Puts a leaf of the largest size that `what` names in place of the table around `gpa`; `what`
    /// has the distance of host memory from guest memory.
    pub fn replace_table(&mut self, gpa: u64, what: Mapping) {
        let before = self.begin();
        let Mapping { hpa: far, attributes, largest } = what;
        let bytes = largest.bytes();
        let base = floor(gpa, bytes);
        let hpa = base.wrapping_add(far);
        let out = self.run(|guard| guard.replace_table(Gpa(gpa), largest, Hpa(hpa), attributes));
        let page = floor(gpa, 1 << H::PAGE);
        let mut legal = self.page_errors(page, largest);
        let height = H::height(bytes);
        let there = legal.is_empty() && before.table(base, height).is_some();
        if there {
            legal.extend(self.host_error(hpa, bytes));
            if legal.is_empty() && !hpa.is_multiple_of(bytes) {
                let (page, bits) = (size(bytes), H::OUTPUT);
                legal.push(MapError::HostAddress { hpa: Hpa(hpa), page, bits });
            }
            legal.extend(self.hardware.refuses(attributes).into_iter().map(MapError::Attributes));
        }
        if !legal.is_empty() {
            self.refused(&before, &out, gpa, &legal);
            return;
        }
        if !there {
            assert_eq!((out.result, out.counts.entries_written), (Ok(None), 0));
            assert_eq!((out.tree.shape(), out.tree.plain()), (before.shape(), before.plain()));
            return;
        }
        assert_eq!(out.result, Ok(Some(bytes)));
        assert_eq!((out.counts.bytes_changed, out.counts.broken, out.owed), (bytes, 1, None));
        let gone = owes([], &[(base, base + bytes)], self.bbm).unwrap();
        assert_eq!(invalidations(&out.events), [gone]);
        assert_eq!(out.events.last(), Some(&Event::Publish));
        let wanted = maintenance(&attributes);
        let all = wanted.map_or(vec![], |_| vec![(hpa, hpa + bytes)]);
        assert_eq!(maintained(&out.events, wanted.as_ref()), all, "memory made coherent");
        let below = before.tables.values();
        let below = below
            .filter(|table| table.within(base, base + bytes))
            .filter(|table| table.height < height || (table.height, table.start) == (height, base));
        // A table of pages is held by one entry, others by all of theirs.
        let held = |height| if height == 0 { 1 } else { H::entries(height) as u64 };
        let held: u64 = below.clone().map(|table| held(table.height - 1)).sum();
        assert_eq!(out.counts.entries_written, 2 * held + 2);
        self.retired += below.count();
        self.replaced.extend(before.within(base, base + bytes));
        let mut flat = self.flat.borrow_mut();
        let mut new = attributes;
        for (_, piece) in flat.within(base, base + bytes) {
            new.accessed |= piece.attributes.accessed;
            new.dirty |= piece.attributes.dirty;
        }
        flat.unmap(base, base + bytes);
        flat.map(base, base + bytes, hpa, new);
        drop(flat);
        self.settle(&out.tree);
    }
}
