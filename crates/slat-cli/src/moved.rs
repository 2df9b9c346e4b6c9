//! Translates command lines of an older `slat` to those of today.

/// Scenarios of Slat's own tables, which `slat bench` measured formerly.
const ENGINE: [&str; 5] = ["split", "engine", "reclaim", "idle", "cache-toggle"];

/// Options that select Slat's own tables, in scenarios that both programs have.
const OPTIONS: [&str; 5] = ["--format", "--bbm", "--exit", "--way", "--granule"];

/// Returns the message that says what to write in place of these words, if they are of an older
/// command line.
pub fn moved(words: &[String]) -> Option<String> {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let (scenario, rest) = match *words.first()? {
        "replay" | "check" => (words[0], &words[1..]),
        "bench" if words.contains(&"--all-peers") => ("peers", &words[1..]),
        "bench" => (*words.get(1)?, &words[2..]),
        _ => return None,
    };
    let target = target(rest);
    let engine = ENGINE.contains(&scenario)
        || words[0] != "bench"
        || scenario == "peers"
        || target == Some("engine")
        || rest.iter().any(|word| OPTIONS.contains(&word.split('=').next().unwrap_or(word)));
    let left = without_target(rest);
    let line = |program: &str| [&[program, scenario], &left[..]].concat().join(" ");
    if engine {
        let line = line("slat-bench");
        let run = line.replacen("slat-bench", "cargo run --release -p slat-bench --", 1);
        return Some(format!(
            "tables of the engine's are measured by a program of their own now: `{line}`\n\n  {run}"
        ));
    }
    (target == Some("kvm")).then(|| {
        let line = line("slat bench");
        format!("`slat bench` measures guests under KVM, so leave out --target: `{line}`")
    })
}

/// Returns the value of `--target`.
fn target<'w>(words: &[&'w str]) -> Option<&'w str> {
    let value = words.iter().find_map(|word| word.strip_prefix("--target="));
    value.or_else(|| words.windows(2).find(|pair| pair[0] == "--target").map(|pair| pair[1]))
}

/// Returns the words without `--all-peers`, and without `--target` where its value is `engine` or
/// `kvm`. Other values stay, because `slat-bench` has a `--target` of its own.
fn without_target<'w>(words: &[&'w str]) -> Vec<&'w str> {
    let mut left = Vec::new();
    let mut words = words.iter().peekable();
    while let Some(&word) = words.next() {
        let of_guest = |value: &str| ["engine", "kvm"].contains(&value);
        match word {
            "--all-peers" => {}
            "--target" if words.peek().is_some_and(|value| of_guest(value)) => {
                words.next();
            }
            _ if word.strip_prefix("--target=").is_some_and(of_guest) => {}
            _ => left.push(word),
        }
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now(line: &str) -> Option<String> {
        moved(&line.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn an_older_command_line_is_answered_with_the_newer() {
        for (old, new) in [
            ("bench split --backing 2m", "`slat-bench split --backing 2m`"),
            ("bench engine --quick", "`slat-bench engine --quick`"),
            ("bench --all-peers --quick", "`slat-bench peers --quick`"),
            ("bench dirty-log --target engine -v 2", "`slat-bench dirty-log -v 2`"),
            ("bench execute --format arm64", "`slat-bench execute --format arm64`"),
            ("bench split --target linux-source", "`slat-bench split --target linux-source`"),
            ("replay --only execute", "`slat-bench replay --only execute`"),
            ("check --linux-tree a", "`slat-bench check --linux-tree a`"),
            ("bench dirty-log --target kvm -v 2", "`slat bench dirty-log -v 2`"),
            ("bench age --target=kvm", "`slat bench age`"),
        ] {
            assert!(now(old).unwrap().contains(new), "{old}: {:?}", now(old));
        }
        for wrong in ["bench dirty-log --memory x", "doctor --for x", "bench"] {
            assert_eq!(now(wrong), None, "{wrong}");
        }
    }
}
