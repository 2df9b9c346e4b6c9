//! Buffers of addresses that hardware marked dirty, emptied into the log by the vCPU's thread at
//! its exits while another thread reads and clears the log.

use crate::fixture::*;
use crate::pieces::{FIRST, Fixture, follow, hardware, logs};
use slat::{Access, Gpa};
use slat_guest::*;
use std::cell::RefCell;

/// A CPU with FEAT_HDBSS: writes the addresses of leaves that it marks into its buffer.
struct BufferedCpu {
    vcpu: TheVcpu,
    buffer: RefCell<Vec<u64>>,
}

impl BufferedCpu {
    /// Writes one value, and exits: the buffer goes into the log.
    fn write(&mut self, world: &World, ram: &Ram, gpa: u64, value: u64) {
        let marked = || self.buffer.borrow_mut().push(gpa);
        if !hardware((world, ram), &self.vcpu, (gpa, value), marked) {
            self.vcpu.fault(Gpa(gpa), Access::Write);
            let marked = || self.buffer.borrow_mut().push(gpa);
            hardware((world, ram), &self.vcpu, (gpa, value), marked);
        }
        let written = self.buffer.take().into_iter().map(|gpa| (Gpa(gpa), PAGE));
        self.vcpu.worker().log_addresses(written);
    }
}

#[test]
fn a_clear_beside_an_emptied_buffer_loses_no_write() {
    bounded("writes, buffer into the log || clear", 3, || {
        let (logging, log_buffers) = (Logging::Hardware, true);
        let config = Config { logging, log_buffers, ..config() };
        let (fixture, mut worker) = Fixture::of(config, logs());
        let (world, ram) = (fixture.world, fixture.ram);
        let mut writer = BufferedCpu { vcpu: vcpu(fixture.guest), buffer: RefCell::default() };
        writer.write(world, ram, FIRST, 1);
        let mut copy = [0; 4];
        let writer = SendCell(writer);
        let thread = spawn(move || {
            let mut writer = writer.get();
            // A bit that is lost shows at the next write, which finds the leaf marked.
            writer.write(world, ram, FIRST, 2);
            writer.write(world, ram, FIRST, 3);
        });
        follow(&fixture, &mut worker, &mut copy);
        thread.join().unwrap();
        follow(&fixture, &mut worker, &mut copy);
        assert_eq!(copy, fixture.content());
    });
}
