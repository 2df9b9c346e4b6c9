//! `Format` numbers what its implementations promise, and each of them answers by these numbers.

use std::path::Path;

/// Returns the numbers of a comment's points, in their order.
fn numbers<'a>(lines: impl Iterator<Item = &'a str>) -> Vec<usize> {
    let point = |line: &'a str| line.trim_start_matches('/').trim_start().split_once(". ");
    lines.filter_map(|line| point(line)?.0.parse().ok()).collect()
}

/// Returns the comment above `item`, without the part above a line that ends in `head`.
fn comment<'a>(source: &'a str, item: &str, head: &str) -> impl Iterator<Item = &'a str> {
    let at = source.find(item).expect("the item");
    let above = source[..at].rsplit('\n').skip(1).take_while(|line| line.starts_with("//"));
    let points: Vec<_> = above.take_while(|line| !line.ends_with(head)).collect();
    points.into_iter().rev()
}

#[test]
fn each_format_answers_each_promise_by_its_number() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/format");
    let read = |path: &Path| std::fs::read_to_string(path).unwrap();
    let the_trait = read(&folder.join("mod.rs"));
    let promised = numbers(comment(&the_trait, "pub unsafe trait Format", "# Safety"));
    assert_eq!(promised, Vec::from_iter(1..=promised.len()));
    assert!(promised.len() >= 6, "{promised:?}");
    let mut formats = 0;
    for file in std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()) {
        let source = if file.is_file() { read(&file) } else { continue };
        let implementation =
            |line: &&str| line.starts_with("unsafe impl") && line.contains(" Format for ");
        for line in source.lines().filter(implementation) {
            let answered = numbers(comment(&source, line, "SAFETY:"));
            assert_eq!(answered, promised, "{}: {line}", file.display());
            formats += 1;
        }
    }
    assert!(formats >= 6, "{formats} formats were found");
}
