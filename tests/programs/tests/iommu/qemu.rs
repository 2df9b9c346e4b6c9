//! QEMU, driven from outside by its qtest protocol, and memory that both processes map.

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use slat::Hpa;
use std::cell::RefCell;
use std::ffi::c_void;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Bytes of the machine's memory.
pub const MEMORY: usize = 64 << 20;

/// A machine whose CPU halts at once.
pub struct Qemu {
    child: Child,
    lines: RefCell<(BufReader<UnixStream>, UnixStream)>,
    memory: *mut c_void,
}

impl Qemu {
    /// Starts the machine with these options.
    pub fn start(program: &str, options: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let [memory, socket, rom] =
            ["memory", "socket", "rom"].map(|name| folder.path().join(name));
        let file = File::options().read(true).write(true).create_new(true).open(&memory).unwrap();
        file.set_len(MEMORY as u64).unwrap();
        // At the reset vector: cli; hlt; jmp to hlt.
        let mut code = vec![0xf4; 65536];
        code[65520..65524].copy_from_slice(&[0xfa, 0xf4, 0xeb, 0xfd]);
        fs::write(&rom, code).unwrap();
        let listener = UnixListener::bind(&socket).unwrap();
        let mut command = Command::new(program);
        command.args(options).args(["-nodefaults", "-no-user-config", "-display", "none"]);
        command.args(["-accel", "tcg", "-icount", "shift=0,sleep=off"]);
        command.arg("-bios").arg(&rom).args(["-m", "64M"]);
        let path = memory.display();
        let backend = format!("memory-backend-file,id=mem,size={MEMORY},mem-path={path},share=on");
        command.args(["-object", &backend, "-qtest-log", "none"]);
        command.args(["-qtest", &format!("unix:{}", socket.display())]);
        // QEMU tells each refusal on stderr.
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        // SAFETY: `prctl` may be called between fork and exec, and nothing is allocated.
        unsafe {
            command.pre_exec(|| {
                let kill = Some(rustix::process::Signal::KILL);
                Ok(rustix::process::set_parent_process_death_signal(kill)?)
            });
        }
        let child = command.spawn().unwrap_or_else(|error| panic!("{program}: {error}"));
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let memory = unsafe {
            mmap(std::ptr::null_mut(), MEMORY, rights, MapFlags::SHARED, &file, 0).unwrap()
        };
        let lines = RefCell::new((BufReader::new(stream.try_clone().unwrap()), stream));
        let qemu = Self { child, lines, memory };
        // QEMU has opened its files once it answers; the folder may go.
        qemu.read32(0);
        qemu
    }

    /// Sends a line, and returns the number that QEMU answers.
    fn ask(&self, text: &str) -> u64 {
        let (answers, questions) = &mut *self.lines.borrow_mut();
        questions.write_all(format!("{text}\n").as_bytes()).unwrap();
        loop {
            let mut line = String::new();
            assert!(answers.read_line(&mut line).unwrap() > 0, "QEMU has ended: {text}");
            if line.starts_with("IRQ") {
                continue;
            }
            let rest = line.trim().strip_prefix("OK").unwrap_or_else(|| panic!("{text}: {line}"));
            let number = rest.trim().strip_prefix("0x");
            return number.map_or(0, |hex| u64::from_str_radix(hex, 16).unwrap());
        }
    }

    /// Reads a register.
    pub fn read32(&self, at: u64) -> u64 {
        self.ask(&format!("readl {at:#x}"))
    }

    /// Reads a register.
    pub fn read64(&self, at: u64) -> u64 {
        self.ask(&format!("readq {at:#x}"))
    }

    /// Writes a register.
    pub fn write32(&self, at: u64, value: u64) {
        self.ask(&format!("writel {at:#x} {value:#x}"));
    }

    /// Writes a register.
    pub fn write64(&self, at: u64, value: u64) {
        self.ask(&format!("writeq {at:#x} {value:#x}"));
    }

    /// Writes an I/O port.
    pub fn out32(&self, port: u64, value: u64) {
        self.ask(&format!("outl {port:#x} {value:#x}"));
    }

    /// Returns the place of memory in this process.
    pub fn word(&self, at: Hpa) -> *mut u64 {
        assert!(at.0.is_multiple_of(8) && at.0 < MEMORY as u64, "{at:?}");
        self.memory.cast::<u8>().wrapping_add(at.0 as usize).cast()
    }

    /// Reads memory.
    pub fn get(&self, at: u64) -> u64 {
        // SAFETY: aligned and inside the mapping, of which there is no reference.
        unsafe { self.word(Hpa(at)).read_volatile() }
    }

    /// Writes memory.
    pub fn put(&self, at: u64, value: u64) {
        // SAFETY: as for `get`.
        unsafe { self.word(Hpa(at)).write_volatile(value) }
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
        // SAFETY: the mapping was made by `start`, and nothing uses it any more.
        let _ = unsafe { munmap(self.memory, MEMORY) };
    }
}

/// QEMU's device `edu`, which copies between memory and its buffer of 4 KiB.
pub struct Edu<'q> {
    qemu: &'q Qemu,
    registers: u64,
}

impl<'q> Edu<'q> {
    /// The device, with its registers at `registers`.
    pub const fn new(qemu: &'q Qemu, registers: u64) -> Self {
        Self { qemu, registers }
    }

    /// Where its buffer is, as its registers name it.
    const BUFFER: u64 = 0x40000;

    fn copy(&self, from: u64, to: u64, command: u64) {
        for (register, value) in [(0x80, from), (0x88, to), (0x90, 8), (0x98, command)] {
            self.qemu.write64(self.registers + register, value);
        }
        while self.qemu.read64(self.registers + 0x98) & 1 != 0 {}
    }

    /// Reads 8 bytes into the buffer.
    pub fn fill(&self, at: u64) {
        self.copy(at, Self::BUFFER, 1);
    }

    /// Writes 8 bytes out of the buffer.
    pub fn spill(&self, at: u64) {
        self.copy(Self::BUFFER, at, 3);
    }
}
