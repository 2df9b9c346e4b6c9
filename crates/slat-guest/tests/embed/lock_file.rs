//! What a crate outside this workspace gets into its lock file.

use std::path::Path;
use std::process::Command;

#[test]
fn a_user_of_slat_and_slat_guest_locks_four_crates() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let user = Path::new(env!("CARGO_TARGET_TMPDIR")).join("user");
    std::fs::create_dir_all(user.join("src")).unwrap();
    std::fs::write(user.join("src/lib.rs"), "").unwrap();
    let path = |name| format!("{name} = {{ path = {:?} }}\n", crates.join(name));
    let manifest = "[package]\nname = \"user\"\nedition = \"2024\"\n[workspace]\n[dependencies]\n";
    let manifest = manifest.to_owned() + &path("slat") + &path("slat-guest");
    std::fs::write(user.join("Cargo.toml"), manifest).unwrap();
    let lock = user.join("Cargo.lock");
    let _ = std::fs::remove_file(&lock);
    let mut cargo = Command::new(env!("CARGO"));
    let output =
        cargo.args(["generate-lockfile", "--offline"]).current_dir(&user).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lock = std::fs::read_to_string(lock).unwrap();
    let names = lock.lines().filter_map(|line| line.strip_prefix("name = "));
    let names: Vec<_> = names.map(|name| name.trim_matches('"')).collect();
    assert_eq!(names, ["slat", "slat-guest", "spin", "user"]);
}
