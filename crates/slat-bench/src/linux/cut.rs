//! Cuts functions out of a C file, so that its callers of the walks can be compiled without the
//! rest of it.

/// Returns the definition of `name`, from its first word to its closing brace, without comments
/// before it.
pub fn function<'s>(source: &'s str, name: &str) -> Option<&'s str> {
    items(source).into_iter().find(|item| defines(item, name))
}

/// Returns the definition of the macro `name`, with its continuation lines.
pub fn directive<'s>(source: &'s str, name: &str) -> Option<&'s str> {
    let at = source.find(&format!("#define {name}("))?;
    Some(&source[at..after_directive(source, at)])
}

/// Returns whether an item is a function of that name: the name, parameters, a body.
fn defines(item: &str, name: &str) -> bool {
    let Some(body) = item.find('{') else { return false };
    let head = item[..body].trim_end();
    let Some(at) = head.find(&format!("{name}(")) else { return false };
    let alone = |c: char| !c.is_alphanumeric() && c != '_';
    // Not the end of a longer name, and not a call in an initialiser.
    at > 0 && head[..at].ends_with(alone) && !head.contains('=') && head.ends_with(')')
}

/// Returns the items of a file: the text between semicolons and closing braces outside of all
/// braces, without comments, strings and preprocessor lines.
fn items(source: &str) -> Vec<&str> {
    let bytes = source.as_bytes();
    let mut items = Vec::new();
    let (mut at, mut depth, mut start) = (0, 0usize, None);
    while at < bytes.len() {
        let next = match bytes[at] {
            b'/' if bytes[at..].starts_with(b"/*") => after(source, at + 2, "*/"),
            b'/' if bytes[at..].starts_with(b"//") => after(source, at, "\n"),
            b'#' if begins_line(bytes, at) => after_directive(source, at),
            quote @ (b'"' | b'\'') => after_quote(bytes, at + 1, quote),
            byte => {
                if start.is_none() && !byte.is_ascii_whitespace() {
                    start = Some(at);
                }
                depth = match byte {
                    b'{' => depth + 1,
                    b'}' => depth.saturating_sub(1),
                    _ => depth,
                };
                if depth == 0 && matches!(byte, b'}' | b';') {
                    items.extend(start.take().map(|start| &source[start..=at]));
                }
                at + 1
            }
        };
        // A directive between items ends what looked like the beginning of an item: it was the use
        // of a macro.
        if bytes[at] == b'#' && depth == 0 && begins_line(bytes, at) {
            start = None;
        }
        at = next;
    }
    items
}

fn begins_line(bytes: &[u8], at: usize) -> bool {
    let before = bytes[..at].iter().rev().take_while(|byte| **byte != b'\n');
    before.into_iter().all(u8::is_ascii_whitespace)
}

fn after(source: &str, at: usize, end: &str) -> usize {
    source[at..].find(end).map_or(source.len(), |found| at + found + end.len())
}

/// Returns the end of a preprocessor line, with its continuation lines.
fn after_directive(source: &str, at: usize) -> usize {
    let mut end = after(source, at, "\n");
    while source[..end].ends_with("\\\n") {
        end = after(source, end, "\n");
    }
    end
}

fn after_quote(bytes: &[u8], mut at: usize, quote: u8) -> usize {
    while at < bytes.len() && bytes[at] != quote {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    at + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "\
#include <a.h>
#define M(x) \\
	do { one(x); } while (0)
/* one() { */
static int a = one(1);
static inline int
one(int x)
{
	char *s = \"}\"; // }
	if (x) { return '}'; }
#ifdef B
	return two(x);
#endif
}
static int two(int x);
MODULE(two);

/* about two */
int two(int (*f)(int x),
	int y)
{
	return f(y);
}
int not_two(int x) { return 0; }
";

    #[test]
    fn a_function_is_cut_whole_and_without_the_comment_before_it() {
        let one = function(SOURCE, "one").unwrap();
        assert!(one.starts_with("static inline int\none(int x)\n{"), "{one}");
        assert!(one.ends_with("#endif\n}"), "{one}");
        let two = function(SOURCE, "two").unwrap();
        assert!(two.starts_with("int two(int (*f)") && two.ends_with("return f(y);\n}"), "{two}");
    }

    #[test]
    fn what_is_declared_called_or_longer_is_not_the_function() {
        assert_eq!(function(SOURCE, "tw"), None);
        assert_eq!(function(SOURCE, "M"), None);
        assert!(directive(SOURCE, "M").unwrap().ends_with("while (0)\n"));
        assert_eq!(function("int x = f(1); g(f(2)); int h(void) { f(3); }", "f"), None);
        assert_eq!(function("int f(void) { {", "f"), None);
    }
}
