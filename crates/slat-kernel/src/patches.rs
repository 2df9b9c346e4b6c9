//! Patches as people have them: a diff, the output of `git format-patch`, a folder of such files,
//! an mbox with a cover letter and replies. Git splits and decodes mails.

use crate::diff::{NO_GIT, is_diff};
use crate::{Author, Edit, Error};
use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The name that stands for standard input.
const STDIN: &str = "-";

/// Endings of files in a folder of patches.
const ENDINGS: [&str; 6] = ["patch", "diff", "mbox", "mbx", "eml", "gz"];

/// A mail with a diff.
#[derive(Clone, Debug)]
struct PatchMail {
    edit: Edit,
    tag: Tag,
    id: String,
}

/// What the brackets before a subject say: `[PATCH v2 1/3]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Tag {
    version: u32,
    /// Its number, and that of all.
    place: Option<(u32, u32)>,
}

/// Reads patches, in the order in which they apply. Returns them, and sentences on what was left
/// out.
///
/// # Errors
/// [`Error::Malformed`] for what has no patch, or lacks one of its series; [`Error::Io`].
pub fn read(paths: &[PathBuf]) -> Result<(Vec<Edit>, Vec<String>), Error> {
    let (mut all, mut notes) = (Vec::new(), Vec::new());
    for path in paths {
        let posted = if path.is_dir() { folder(path)? } else { file(path, &mut notes)? };
        all.extend(posted.into_iter().map(|posted| posted.edit));
    }
    // Two files may have patches of one name.
    let mut names = BTreeSet::new();
    for edit in &mut all {
        let name = edit.name.clone();
        let mut number = 2;
        while !names.insert(edit.name.clone()) {
            edit.name = format!("{name}-{number}");
            number += 1;
        }
    }
    Ok((all, notes))
}

fn malformed(path: &Path, why: impl Into<String>) -> Error {
    Error::Malformed { step: path.to_owned(), why: why.into() }
}

/// Reads a folder: by its `series` file, as quilt has it, or by the numbers or names of its files.
fn folder(path: &Path) -> Result<Vec<PatchMail>, Error> {
    let failed = || Error::io(format!("cannot read {}", path.display()));
    if let Ok(list) = fs::read_to_string(path.join("series")) {
        let names = list.lines().filter_map(|line| line.split_whitespace().next());
        let names = names.filter(|name| !name.starts_with('#'));
        let each: Result<Vec<Vec<PatchMail>>, Error> =
            names.map(|name| file(&path.join(name), &mut Vec::new())).collect();
        return Ok(each?.concat());
    }
    let mut files = Vec::new();
    for entry in fs::read_dir(path).map_err(failed())? {
        let file = entry.map_err(failed())?.path();
        let ending = file.extension().and_then(|ending| ending.to_str());
        if ending.is_some_and(|ending| ENDINGS.contains(&ending)) {
            files.push(file);
        }
    }
    files.sort();
    let mut all = Vec::new();
    for file in &files {
        all.extend(messages(file, &contents(file)?)?);
    }
    if all.is_empty() {
        return Err(malformed(path, format!("it has no patch (*.{})", ENDINGS.join(", *."))));
    }
    ordered(path, all, false)
}

fn file(path: &Path, notes: &mut Vec<String>) -> Result<Vec<PatchMail>, Error> {
    let mut all = messages(path, &contents(path)?)?;
    // A thread may have a newer version in answer to the first.
    if let Some(newest) = all.iter().map(|posted| posted.tag.version).max() {
        let count = all.len();
        all.retain(|posted| posted.tag.version == newest);
        if all.len() < count {
            let older = count - all.len();
            let name = path.display();
            notes.push(format!("{name}: v{newest} is taken, {older} older patches are left out"));
        }
    }
    if all.is_empty() {
        let why = "it has no patch: neither a diff nor a mail with one that is no reply";
        return Err(malformed(path, why));
    }
    ordered(path, all, true)
}

/// Reads a file or standard input, and unpacks it if it is packed, as archives of lists are.
fn contents(path: &Path) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    let failed = Error::io(format!("cannot read {}", path.display()));
    match path == Path::new(STDIN) {
        true => std::io::stdin().lock().read_to_end(&mut bytes).map_err(failed)?,
        false => {
            bytes = fs::read(path).map_err(failed)?;
            bytes.len()
        }
    };
    if bytes.starts_with(&[0x1f, 0x8b]) {
        return piped(Command::new("gzip").arg("-dc"), &bytes)
            .ok_or_else(|| malformed(path, "it is packed, and gzip cannot unpack it"));
    }
    Ok(bytes)
}

/// Runs a program on an input; returns its output, if it succeeds.
fn piped(command: &mut Command, input: &[u8]) -> Option<Vec<u8>> {
    command.env("LC_ALL", "C").env("TZ", "UTC");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().ok()?;
    let pipe = child.stdin.take();
    let output = std::thread::scope(|scope| {
        // Both pipes are bounded: one thread for both would wait for itself.
        scope.spawn(|| pipe.map(|mut pipe| pipe.write_all(input)));
        child.wait_with_output()
    });
    output.ok().filter(|output| output.status.success()).map(|output| output.stdout)
}

/// Returns the patches of a text, without cover letters and replies.
fn messages(path: &Path, bytes: &[u8]) -> Result<Vec<PatchMail>, Error> {
    let text = String::from_utf8_lossy(bytes);
    let stem = path.file_stem().map_or("patch".into(), |stem| stem.to_string_lossy());
    let stem = if path == Path::new(STDIN) { "stdin".into() } else { stem };
    if !is_mail(&text) {
        return Ok(match is_diff(&text) {
            false => Vec::new(),
            true => {
                let edit = edit(path, &slug(&stem), &stem, &text, None);
                vec![PatchMail { edit, tag: Tag::default(), id: String::new() }]
            }
        });
    }
    let git = || malformed(path, NO_GIT);
    let work = tempfile::tempdir().map_err(Error::io("cannot make a temporary folder"))?;
    let option = format!("-o{}", work.path().display());
    piped(Command::new("git").args(["mailsplit", "-b", &option]), bytes).ok_or_else(git)?;
    let mut mails: Vec<PathBuf> = fs::read_dir(work.path())
        .map_err(Error::io("cannot read mails"))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect();
    mails.sort();
    let (message, patch) = (work.path().join("message"), work.path().join("patch"));
    let mut found = Vec::new();
    for mail in mails {
        let bytes = fs::read(&mail).map_err(Error::io("cannot read a mail"))?;
        let mut info = Command::new("git");
        info.args(["mailinfo", "-k", "--encoding=UTF-8"]).arg(&message).arg(&patch);
        let info = piped(&mut info, &bytes).ok_or_else(git)?;
        let info = String::from_utf8_lossy(&info).into_owned();
        let field = |name: &str| {
            let of = |line: &str| Some(line.strip_prefix(name)?.trim().to_owned());
            info.lines().find_map(of).unwrap_or_default()
        };
        let raw = field("Subject: ");
        let diff = fs::read(&patch).map_err(Error::io("cannot read a patch"))?;
        let diff = String::from_utf8_lossy(&diff).into_owned();
        if is_reply(&raw) || !is_diff(&diff) {
            continue;
        }
        let (tag, subject) = tag(&raw);
        let body = fs::read(&message).unwrap_or_default();
        let body = String::from_utf8_lossy(&body);
        let text = format!("{subject}\n\n{}", body.trim());
        let from = format!("{} <{}>", field("Author: "), field("Email: "));
        let author = Author { from, date: field("Date: ") };
        let edit = edit(path, &slug(&subject), &text, &diff, Some(author));
        found.push(PatchMail { edit, tag, id: id(&String::from_utf8_lossy(&bytes)) });
    }
    Ok(found)
}

fn edit(path: &Path, name: &str, message: &str, diff: &str, author: Option<Author>) -> Edit {
    Edit {
        name: name.to_owned(),
        message: message.to_owned(),
        steps: Vec::new(),
        files: Vec::new(),
        objects: Vec::new(),
        diff: Some((path.to_owned(), diff.to_owned())),
        author,
    }
}

/// Returns whether a text is a mail, or several: by its first line.
fn is_mail(text: &str) -> bool {
    let first = text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
    let header = |(name, _): (&str, &str)| {
        !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
    };
    // `git show` begins by `commit`, and svn's diffs by `Index:`.
    first.starts_with("From ")
        || (first.split_once(": ").is_some_and(header) && !first.starts_with("Index:"))
}

fn is_reply(subject: &str) -> bool {
    let begin = subject.split(':').next().unwrap_or_default().trim().to_lowercase();
    subject.contains(':') && ["re", "aw", "sv", "antw"].contains(&&*begin)
}

/// Returns what the brackets say, and the subject after them.
fn tag(subject: &str) -> (Tag, String) {
    let (mut tag, mut rest) = (Tag { version: 1, place: None }, subject.trim());
    while let Some((inside, after)) = rest.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        for word in inside.split([' ', ',']) {
            let version = word.strip_prefix(['v', 'V']).and_then(|version| version.parse().ok());
            tag.version = version.unwrap_or(tag.version);
            let place = word.split_once('/');
            let place = place.and_then(|(n, all)| Some((n.parse().ok()?, all.parse().ok()?)));
            tag.place = place.or(tag.place);
        }
        rest = after.trim();
    }
    (tag, rest.to_owned())
}

/// Returns the mail's own name.
fn id(mail: &str) -> String {
    let mut headers = mail.lines().take_while(|line| !line.trim().is_empty());
    let of = |line: &str| {
        let (name, id) = line.split_once(':')?;
        name.eq_ignore_ascii_case("message-id").then(|| id.trim().to_owned())
    };
    headers.find_map(of).unwrap_or_default()
}

/// Returns a subject as a part of a name.
fn slug(subject: &str) -> String {
    let word = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { ' ' };
    let text: String = subject.chars().map(word).collect();
    let text = text.split_whitespace().collect::<Vec<_>>().join("-");
    let text: String = text.chars().take(40).collect();
    if text.is_empty() { "patch".to_owned() } else { text.trim_end_matches('-').to_owned() }
}

/// Returns the patches in the order of their numbers, if all have one. A file has all of a series,
/// a folder may have a part of it.
fn ordered(path: &Path, mut all: Vec<PatchMail>, is_whole: bool) -> Result<Vec<PatchMail>, Error> {
    let mut ids = BTreeSet::new();
    all.retain(|posted| posted.id.is_empty() || ids.insert(posted.id.clone()));
    let places: Option<Vec<(u32, u32)>> = all.iter().map(|posted| posted.tag.place).collect();
    let Some(places) = places else { return Ok(all) };
    let Some((_, count)) = places.first().copied() else { return Ok(all) };
    if places.iter().any(|(_, other)| *other != count) {
        // Several series, as in a folder for them: their files have an order.
        return Ok(all);
    }
    all.sort_by_key(|posted| posted.tag.place);
    for pair in all.windows(2) {
        if pair[0].tag.place == pair[1].tag.place && is_whole {
            let number = pair[0].tag.place.map_or(0, |(number, _)| number);
            let why = format!("two different mails are patch {number}/{count}; give one of them");
            return Err(malformed(path, why));
        }
    }
    let missing = (1..=count).find(|number| !places.iter().any(|(known, _)| known == number));
    // One mail of a series may be all that was wanted.
    if let Some(missing) = missing.filter(|_| is_whole && all.len() > 1) {
        return Err(malformed(path, format!("patch {missing}/{count} is missing")));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn diff(file: &str) -> String {
        format!("--- a/{file}\n+++ b/{file}\n@@ -1 +1 @@\n-a\n+b\n")
    }

    /// Returns a mail in an mbox.
    fn mail(subject: &str, id: &str, body: &str) -> String {
        format!(
            "From mboxrd@z Thu Jan  1 00:00:00 1970\nFrom: A B <a@b.example>\n\
             Date: Tue, 24 Nov 2026 12:00:00 +0000\nSubject: {subject}\nMessage-ID: <{id}>\n\n\
             {body}\n"
        )
    }

    fn patch(subject: &str, id: &str, file: &str) -> String {
        mail(subject, id, &format!("Why.\n\nSigned-off-by: A\n---\n{}-- \n2.39\n", diff(file)))
    }

    /// Reads texts, each in a file of this name.
    fn of(files: &[(&str, &str)]) -> Result<(Vec<Edit>, Vec<String>), String> {
        let folder = tempfile::tempdir().unwrap();
        let paths = files.iter().map(|(name, text)| {
            let path = folder.path().join(name);
            fs::write(&path, text).unwrap();
            path
        });
        read(&paths.collect::<Vec<_>>()).map_err(|error| error.to_string())
    }

    fn subjects(edits: &[Edit]) -> Vec<&str> {
        edits.iter().map(Edit::subject).collect()
    }

    #[test]
    fn an_mbox_gives_patches_in_order_without_cover_and_replies() {
        let reply = format!("> Why.\nBetter:\n{}", diff("c.c"));
        let mbox = [
            mail("[PATCH 0/2] KVM: two things", "0", "This series ...\n\n a.c | 2 +-\n"),
            patch("[PATCH 2/2] KVM: second", "2", "b.c"),
            mail("Re: [PATCH 2/2] KVM: second", "4", &reply),
            patch("[PATCH 1/2] KVM: first", "1", "a.c"),
            patch("[PATCH 1/2] KVM: first", "1", "a.c"),
        ];
        let (edits, notes) = of(&[("t.mbox", &mbox.concat())]).unwrap();
        assert_eq!(subjects(&edits), ["KVM: first", "KVM: second"]);
        assert!(notes.is_empty());
        assert_eq!(edits[0].message, "KVM: first\n\nWhy.\n\nSigned-off-by: A");
        assert_eq!(edits[0].author.as_ref().unwrap().from, "A B <a@b.example>");
        assert!(edits[0].diff.as_ref().unwrap().1.contains("+++ b/a.c"));
    }

    #[test]
    fn the_newest_version_in_a_thread_counts_and_a_gap_is_an_error() {
        let mbox = [
            patch("[PATCH RFC 1/1] one", "1", "a.c"),
            patch("[PATCH v2 1/2] one", "2", "a.c"),
            patch("[PATCH v2 2/2] two", "3", "b.c"),
        ];
        let (edits, notes) = of(&[("t.mbox", &mbox.concat())]).unwrap();
        assert_eq!(subjects(&edits), ["one", "two"]);
        assert!(notes[0].contains("v2 is taken, 1 older"), "{notes:?}");
        let gap = [patch("[PATCH 1/3] x", "1", "a.c"), patch("[PATCH 3/3] z", "3", "a.c")];
        assert!(of(&[("t.mbox", &gap.concat())]).unwrap_err().contains("patch 2/3 is missing"));
        let two = [patch("[PATCH 1/1] x", "1", "a.c"), patch("[PATCH 1/1] y", "3", "a.c")];
        assert!(of(&[("t.mbox", &two.concat())]).unwrap_err().contains("two different mails"));
    }

    #[test]
    fn diffs_and_single_mails_of_a_series_are_taken_as_given() {
        let (edits, _) = of(&[
            ("0002-b.patch", &patch("[PATCH 2/5] second", "2", "b.c")),
            ("Plain Diff.diff", &diff("a.c")),
            ("show.patch", &format!("commit 12\nAuthor: x\n\n    text\n\n{}", diff("a.c"))),
        ])
        .unwrap();
        assert_eq!(subjects(&edits), ["second", "Plain Diff", "show"]);
        assert_eq!(edits[1].name, "plain-diff");
    }

    #[test]
    fn a_mail_in_another_encoding_is_decoded() {
        let text = "Content-Type: text/plain; charset=utf-8\n\
                    Content-Transfer-Encoding: quoted-printable\n";
        let mail = patch("[PATCH] =?utf-8?q?Caf=C3=A9?=", "1", "a.c");
        let mail = mail.replace("Message-ID", &format!("{text}Message-ID"));
        let mail = mail.replace("-a\n", "-a =3D =C3=A9\n");
        let (edits, _) = of(&[("m.eml", &mail)]).unwrap();
        assert_eq!(edits[0].subject(), "Café");
        assert!(edits[0].diff.as_ref().unwrap().1.contains("-a = é\n"));
    }

    #[test]
    fn a_folder_gives_its_patches_in_order_and_an_empty_one_fails() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        let read = || read(&[folder.path().to_owned()]).map_err(|error| error.to_string());
        assert!(read().unwrap_err().contains("no patch (*.patch"));
        write("0000-cover-letter.patch", &mail("[PATCH 0/2] c", "0", "text\n"));
        write("0002-x.patch", &patch("[PATCH 2/2] two", "2", "b.c"));
        write("0001-y.patch", &patch("[PATCH 1/2] one", "1", "a.c"));
        write("notes.txt", "no patch");
        assert_eq!(subjects(&read().unwrap().0), ["one", "two"]);
        write("series", "0002-x.patch -p1\n# 0001-y.patch\n");
        assert_eq!(subjects(&read().unwrap().0), ["two"]);
        let error = of(&[("mail", &mail("hello", "1", "no diff"))]).unwrap_err();
        assert!(error.contains("it has no patch"), "{error}");
        assert!(of(&[("empty", "")]).unwrap_err().contains("it has no patch"));
    }
}
