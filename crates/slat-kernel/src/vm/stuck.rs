//! Where the CPUs of a machine are that does not end: QEMU's monitor says it, and the kernel's
//! System.map names it.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// The longest path that a socket can have, with room for its end.
const PATH: usize = 100;

/// How long the monitor may take for an answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// What the monitor prints when it waits for a command.
const PROMPT: &str = "(qemu) ";

/// Number of looks, as a CPU may just be in a tick.
const LOOKS: usize = 5;

/// Returns QEMU's option of a monitor at this socket; `None` if its path is too long for one.
pub fn monitor(socket: &Path) -> Option<[String; 2]> {
    let path = socket.to_str().filter(|path| path.len() <= PATH)?.replace(',', ",,");
    Some(["-monitor".to_owned(), format!("unix:{path},server=on,wait=off")])
}

/// Returns the addresses that the CPUs execute at, a few times.
pub fn addresses(socket: &Path) -> Vec<u64> {
    let look = || -> std::io::Result<Vec<u64>> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        answer(&mut stream)?;
        let mut found = Vec::new();
        for _ in 0..LOOKS {
            stream.write_all(b"info registers -a\n")?;
            found.extend(counters(&answer(&mut stream)?));
        }
        Ok(found)
    };
    // QEMU may have ended.
    look().unwrap_or_default()
}

/// Reads until the monitor waits for a command.
fn answer(stream: &mut UnixStream) -> std::io::Result<String> {
    let (mut text, mut bytes) = (Vec::new(), [0; 4096]);
    while !text.ends_with(PROMPT.as_bytes()) {
        match stream.read(&mut bytes)? {
            0 => break,
            count => text.extend(bytes.iter().take(count)),
        }
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Returns the program counters in a list of registers: `PC=` on arm64, `RIP=` on x86.
fn counters(registers: &str) -> Vec<u64> {
    let words = registers.split_whitespace();
    let values = words.filter_map(|word| word.strip_prefix("PC=").or(word.strip_prefix("RIP=")));
    values.filter_map(|value| u64::from_str_radix(value, 16).ok()).collect()
}

/// Returns a symbol of code, local or global, and its address.
fn symbol(line: &str) -> Option<(u64, &str)> {
    let mut words = line.split(' ');
    let (address, kind) = (u64::from_str_radix(words.next()?, 16).ok()?, words.next()?);
    ["t", "T", "w", "W"].contains(&kind).then_some((address, words.next()?))
}

/// Returns the functions that hold most of these addresses, by a System.map; the most frequent
/// first. Addresses of programs and guests are left out.
pub fn functions(map: &str, addresses: &[u64]) -> Vec<String> {
    let mut symbols: Vec<(u64, &str)> = map.lines().filter_map(symbol).collect();
    symbols.sort_unstable();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for address in addresses {
        let after = symbols.partition_point(|(begin, _)| begin <= address);
        let name = after.checked_sub(1).and_then(|at| symbols.get(at));
        // What is beyond the last symbol is no code of the kernel.
        if let Some((_, name)) = name.filter(|_| after < symbols.len()) {
            *counts.entry(name).or_default() += 1;
        }
    }
    let mut names: Vec<(&str, usize)> = counts.into_iter().collect();
    names.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    names.into_iter().map(|(name, _)| name.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    const MAP: &str = "ffff800080000000 T _text\nffff800080000100 t kvm_clear\n\
                       ffff800080000200 T other\nffff800080000300 D data\nffff800080000400 T end\n";

    #[test]
    fn kernel_addresses_are_named_by_function_and_program_ones_not() {
        let addresses = [0x40_0000, 0xffff_8000_8000_0104, 0xffff_8000_8000_01fc];
        assert_eq!(functions(MAP, &addresses), ["kvm_clear"]);
        assert_eq!(functions(MAP, &[u64::MAX, 0x400]), Vec::<String>::new());
    }

    #[test]
    fn a_monitor_is_asked_for_the_registers_of_all_cpus() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("monitor");
        assert!(monitor(&socket).unwrap()[1].ends_with("monitor,server=on,wait=off"));
        assert_eq!(monitor(Path::new(&"x".repeat(PATH + 1))), None);
        let listener = UnixListener::bind(&socket).unwrap();
        let fake = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(b"QEMU 7.2 monitor\r\n(qemu) ").unwrap();
            for _ in 0..LOOKS {
                let mut line = [0; 18];
                stream.read_exact(&mut line).unwrap();
                let text = "info registers -a\r\nCPU#0\r\n PC=ffff800080000104 X00=0\r\n(qemu) ";
                stream.write_all(text.as_bytes()).unwrap();
            }
        });
        assert_eq!(addresses(&socket), [0xffff_8000_8000_0104; LOOKS]);
        fake.join().unwrap();
        assert_eq!(counters("CPU#0\r\nRIP=ffffffff81000000 RFL=2"), [0xffff_ffff_8100_0000]);
        assert!(addresses(&folder.path().join("none")).is_empty());
    }
}
