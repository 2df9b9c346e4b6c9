//! Memory of tables: frames that hold poison before they are filled and after they are freed, and
//! older values that walkers may still read.

use slat::Pte;
use std::alloc::Layout;
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// Content of a frame before it is filled, and after it is freed.
pub(crate) const POISON: u64 = 0xdead_beef_dead_beef;

/// Where frames of tables begin: above the memory of small guests, and below 2^40.
pub(crate) const TABLES: u64 = 0x80_0000_0000;

/// One entry of a frame, valid as long as the machine lives.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cell(NonNull<Pte>);

impl Cell {
    fn pte(&self) -> &Pte {
        // SAFETY: frames are deallocated only when the machine is dropped, and cells do not leave
        // it; entries are atomics, valid for any bytes. Frames that software owns exclusively are
        // not linked, and the machine reads linked ones only (or those of a caller that broke the
        // rules on a single thread).
        unsafe { self.0.as_ref() }
    }

    pub fn load(&self) -> u64 {
        self.pte().load()
    }

    pub fn exchange(&self, old: u64, new: u64) -> Result<(), u64> {
        self.pte().exchange(old, new)
    }

    pub fn store(&self, new: u64) {
        let mut old = self.load();
        while let Err(found) = self.exchange(old, new) {
            old = found;
        }
    }
}

#[derive(Debug)]
pub(crate) struct Table {
    words: NonNull<Pte>,
    layout: Layout,
    pub live: bool,
    /// The values at the last barrier; `None` before the first barrier that found the table linked.
    drained: Option<Vec<u64>>,
}

// SAFETY: the memory belongs to the table, and is shared only as atomics.
unsafe impl Send for Table {}

impl Table {
    pub fn len(&self) -> usize {
        self.layout.size() / 8
    }

    pub fn bytes(&self) -> usize {
        self.layout.size()
    }

    pub fn words(&self) -> NonNull<Pte> {
        self.words
    }

    pub fn cell(&self, index: usize) -> Cell {
        assert!(index < self.len(), "entry {index} of {}", self.len());
        // SAFETY: inside the allocation, by the assertion.
        Cell(unsafe { self.words.add(index) })
    }

    /// Fills the frame with poison, past `Pte`, so that observers of stores do not record it.
    fn poison(&self) {
        for index in 0..self.len() {
            // SAFETY: inside the allocation, which lives as long as `self` and is shared only as
            // atomics; an entry is a transparent wrapper of one.
            let word = unsafe { self.words.cast::<AtomicU64>().add(index).as_ref() };
            word.store(POISON, Ordering::SeqCst);
        }
    }

    /// Returns the value that a walker may read instead of the present one.
    pub fn late(&self, index: usize) -> Option<u64> {
        Some(self.drained.as_ref()?[index]).filter(|&old| old != self.cell(index).load())
    }

    /// Returns the numbers of the first `ptes` entries that a walker may find non-zero.
    pub fn filled(&self, ptes: usize) -> Vec<usize> {
        let may = |&index: &usize| self.cell(index).load() != 0 || self.late(index).is_some();
        (0..ptes).filter(may).collect()
    }

    /// Makes walkers see what the table holds now.
    pub fn drain(&mut self) {
        let now = (0..self.len()).map(|index| self.cell(index).load()).collect();
        self.drained = Some(now);
    }

    pub fn has_drained(&self) -> bool {
        self.drained.is_some()
    }

    /// Records an entry that hardware changed: walkers see this store at once.
    pub fn marked(&mut self, index: usize, raw: u64) {
        if let Some(drained) = &mut self.drained {
            drained[index] = raw;
        }
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        // SAFETY: allocated with that layout; the machine that hands out its address is gone.
        unsafe { std::alloc::dealloc(self.words.as_ptr().cast(), self.layout) };
    }
}

/// All frames ever allocated. No address is used twice.
#[derive(Debug)]
pub(crate) struct Memory {
    tables: BTreeMap<u64, Table>,
    pub next: u64,
    pub live: usize,
    pub limit: usize,
}

impl Default for Memory {
    fn default() -> Self {
        Self { tables: BTreeMap::new(), next: TABLES, live: 0, limit: usize::MAX }
    }
}

impl Memory {
    pub fn allocate(&mut self, bytes: usize) -> Option<u64> {
        if self.live >= self.limit {
            return None;
        }
        let layout = Layout::from_size_align(bytes, bytes).expect("a power of two");
        assert!(bytes >= 4096, "frames are pages at least");
        // SAFETY: the size is not zero. Zeroed, so that the words are initialised.
        let words = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }.cast::<Pte>())?;
        let table = Table { words, layout, live: true, drained: None };
        table.poison();
        let hpa = self.next.next_multiple_of(bytes as u64);
        self.next = hpa + bytes as u64;
        self.live += 1;
        self.tables.insert(hpa, table);
        Some(hpa)
    }

    /// Frees a frame.
    ///
    /// # Errors
    /// A description of the error in the call.
    pub fn free(&mut self, hpa: u64, bytes: usize) -> Result<(), &'static str> {
        let table = self.tables.get_mut(&hpa).ok_or("no frame begins there")?;
        if !table.live {
            return Err("it was freed before");
        }
        if table.bytes() != bytes {
            return Err("it has another size");
        }
        table.live = false;
        table.drained = None;
        table.poison();
        self.live -= 1;
        Ok(())
    }

    pub fn get(&self, hpa: u64) -> Option<&Table> {
        self.tables.get(&hpa)
    }

    pub fn get_mut(&mut self, hpa: u64) -> Option<&mut Table> {
        self.tables.get_mut(&hpa)
    }

    /// Returns the frame that contains `hpa`.
    pub fn around(&self, hpa: u64) -> Option<(u64, &Table)> {
        let (&start, table) = self.tables.range(..=hpa).next_back()?;
        (hpa < start + table.bytes() as u64).then_some((start, table))
    }

    pub fn live_tables(&mut self) -> impl Iterator<Item = (u64, &mut Table)> {
        self.tables.iter_mut().filter(|(_, table)| table.live).map(|(&hpa, table)| (hpa, table))
    }

    /// Returns the freed frames that were written after that.
    pub fn spoilt(&self) -> Vec<u64> {
        let spoilt = |table: &Table| {
            !table.live && (0..table.len()).any(|index| table.cell(index).load() != POISON)
        };
        self.tables.iter().filter(|(_, table)| spoilt(table)).map(|(&hpa, _)| hpa).collect()
    }
}
