//! The public interface of a crate as lines of text, one for each item.

use anyhow::{Context, ensure};
use public_api::Builder;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

/// Follows an item of a trait without a default: implementations of the trait have to write it.
pub const REQUIRED: &str = " [required]";

/// Follows a struct that users cannot build from its fields.
pub const PRIVATE: &str = " [private fields]";

/// Follows an item that does not exist with the default features.
pub const BY_A_FEATURE: &str = " [by a feature]";

/// Traits that the compiler implements and users do not name, or that are not stable.
const UNASKED: [&str; 5] = [
    "core::marker::Freeze",
    "core::marker::StructuralPartialEq",
    "core::marker::UnsafeUnpin",
    "core::panic::unwind_safe::RefUnwindSafe",
    "core::panic::unwind_safe::UnwindSafe",
];

/// The version of rustdoc's format that `public-api` reads.
const FORMAT: u64 = 57;

/// Returns the lines for rustdoc's output.
pub fn of(json: &Path) -> anyhow::Result<BTreeSet<String>> {
    let text = std::fs::read(json).with_context(|| json.display().to_string())?;
    let documentation: Value = serde_json::from_slice(&text).context("what rustdoc wrote")?;
    let format = &documentation["format_version"];
    ensure!(*format == FORMAT, "rustdoc writes format {format}, and {FORMAT} is read");
    let index = &documentation["index"];
    let api = Builder::from_rustdoc_json(json).omit_blanket_impls(true).build()?;
    let mut lines = BTreeSet::new();
    for item in api.items() {
        let inner = |id: u32| &index[id.to_string()]["inner"];
        let parent = item.parent_id().map_or(&Value::Null, |id| inner(id.0));
        if let Some(line) = line(&item.to_string(), inner(item.id().0), parent) {
            lines.insert(line);
        }
    }
    Ok(lines)
}

/// Returns the line of an item; `None` if another line implies it.
fn line(text: &str, item: &Value, parent: &Value) -> Option<String> {
    // The trait has the signatures of an implementation's methods.
    if !parent["impl"]["trait"].is_null() && !item["function"].is_null() {
        return None;
    }
    let is_unasked = |name| text.contains(&format!("{name} for "));
    if text.starts_with("impl") && UNASKED.iter().any(is_unasked) {
        return None;
    }
    let of_trait = !parent["trait"].is_null();
    let required = item["function"]["has_body"] == false
        || !item["assoc_const"].is_null() && item["assoc_const"]["value"].is_null()
        || !item["assoc_type"].is_null() && item["assoc_type"]["type"].is_null();
    let kind = &item["struct"]["kind"];
    let private = kind["plain"]["has_stripped_fields"] == true
        || kind["tuple"].as_array().is_some_and(|fields| fields.contains(&Value::Null));
    let note = match () {
        () if of_trait && required => REQUIRED,
        () if private => PRIVATE,
        () => "",
    };
    Some(format!("{text}{note}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_item_of_a_trait_says_whether_it_has_a_default() {
        let of_trait = json!({ "trait": { "items": [] } });
        for (item, note) in [
            (json!({ "function": { "has_body": false } }), REQUIRED),
            (json!({ "function": { "has_body": true } }), ""),
            (json!({ "assoc_const": { "value": null } }), REQUIRED),
            (json!({ "assoc_const": { "value": "1" } }), ""),
            (json!({ "assoc_type": { "type": null } }), REQUIRED),
        ] {
            assert_eq!(line("item", &item, &of_trait), Some(format!("item{note}")));
        }
    }

    #[test]
    fn a_struct_says_whether_others_can_build_it() {
        for (item, note) in [
            (
                json!({ "struct": { "kind": { "plain": { "has_stripped_fields": true } } } }),
                PRIVATE,
            ),
            (json!({ "struct": { "kind": { "plain": { "has_stripped_fields": false } } } }), ""),
            (json!({ "struct": { "kind": { "tuple": [1, null] } } }), PRIVATE),
            (json!({ "struct": { "kind": { "tuple": [1] } } }), ""),
            (json!({ "struct": { "kind": "unit" } }), ""),
        ] {
            assert_eq!(line("item", &item, &Value::Null), Some(format!("item{note}")));
        }
    }

    #[test]
    fn methods_of_implementations_are_left_out_and_their_types_are_not() {
        let implementation = json!({ "impl": { "trait": { "path": "Iterator" } } });
        let method = json!({ "function": { "has_body": true } });
        assert_eq!(line("item", &method, &implementation), None);
        let item = json!({ "assoc_type": { "type": { "primitive": "u8" } } });
        assert_eq!(line("item", &item, &implementation), Some("item".to_owned()));
        let own = json!({ "impl": { "trait": null } });
        assert_eq!(line("item", &method, &own), Some("item".to_owned()));
    }
}
