//! Builds all mutants of a file into one program; a variable chooses one of them when the tests
//! run. A mutant costs only the time of its tests, and no build.

use super::list::{Kind, Mutant, Place};
use anyhow::Context;
use proc_macro2::Span;
use quote::ToTokens;
use std::collections::BTreeSet;
use syn::spanned::Spanned;
use syn::visit_mut::{self, VisitMut};
use syn::{BinOp, Block, Expr, Pat, UnOp, parse_quote};

/// The environment variable that has the mutant's number.
pub const VARIABLE: &str = "SLAT_MUTANT";
/// The one that names a file: the numbers of the mutants that the program comes past go there.
pub const REACHED: &str = "SLAT_MUTANTS_REACHED";

/// The function that each mutant calls; it is appended to the library's first file.
pub const CHOICE: &str = r#"
mod slat_mutants {
    extern crate std;
    use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
    use std::{env, fs, io::Write, string::ToString};
    const NONE: u32 = u32::MAX - 2;
    const TELL: u32 = u32::MAX - 1;
    static CHOSEN: AtomicU32 = AtomicU32::new(u32::MAX);
    static REACHED: [AtomicU64; 1024] = [const { AtomicU64::new(0) }; 1024];
    #[inline(always)]
    pub(crate) fn is_chosen(number: u32) -> bool {
        let chosen = CHOSEN.load(Relaxed);
        number == chosen || chosen > NONE && choose(number)
    }
    #[cold]
    fn choose(number: u32) -> bool {
        let Ok(file) = env::var("SLAT_MUTANTS_REACHED") else {
            let chosen = env::var("SLAT_MUTANT").ok().and_then(|chosen| chosen.parse().ok());
            let chosen = chosen.unwrap_or(NONE);
            CHOSEN.store(chosen, Relaxed);
            return number == chosen;
        };
        CHOSEN.store(TELL, Relaxed);
        let bit = 1 << (number % 64);
        if REACHED[number as usize / 64].fetch_or(bit, Relaxed) & bit == 0 {
            let mut file = fs::File::options().create(true).append(true).open(file).unwrap();
            file.write_all((number.to_string() + "\n").as_bytes()).unwrap();
        }
        false
    }
}
pub(crate) use slat_mutants::is_chosen as slat_mutant;
"#;

/// Text before the number in a program's source.
const ASKED: &str = "slat_mutant (";

/// Returns the source with these mutants, each with its number, and the numbers of those that could
/// be inserted. Mutants in constants, and in patterns that need an expression, cannot.
pub fn weave(source: &str, mutants: &[(u32, &Mutant)]) -> anyhow::Result<(String, BTreeSet<u32>)> {
    let mut file = syn::parse_file(source).context("a file does not parse")?;
    let mut weaver = Weaver { mutants, woven: BTreeSet::new(), constant: false };
    weaver.visit_file_mut(&mut file);
    Ok((file.to_token_stream().to_string(), weaver.woven))
}

/// Returns the mutant at the text between two bytes: the first one within, else the last one
/// before.
pub fn mutant_at(text: &str, start: usize, end: usize) -> Option<u32> {
    let number = |at: usize| {
        let digits = text[at + ASKED.len()..].trim_start();
        digits.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    };
    // A mutant that begins within may end after it.
    let end = (end + ASKED.len()).min(text.len());
    let within = text.get(start..end)?.find(ASKED).map(|at| start + at);
    within.or_else(|| text.get(..start)?.rfind(ASKED)).and_then(number)
}

struct Weaver<'a> {
    mutants: &'a [(u32, &'a Mutant)],
    woven: BTreeSet<u32>,
    /// Whether the code is in a `const fn`, which cannot call `slat_mutant`.
    constant: bool,
}

impl Weaver<'_> {
    /// Returns the mutants of a kind that begin here, with their replacements.
    fn at(&mut self, kind: Kind, span: Span) -> Vec<(u32, String)> {
        if self.constant {
            return Vec::new();
        }
        let start = span.start();
        let here = Place { line: start.line, column: start.column + 1 };
        let of = |mutant: &Mutant| mutant.kind == kind && mutant.from == here;
        let found = self.mutants.iter().filter(|(_, mutant)| of(mutant));
        let found: Vec<_> = found.map(|(id, mutant)| (*id, mutant.replacement.clone())).collect();
        self.woven.extend(found.iter().map(|(id, _)| id));
        found
    }

    /// As [`Self::at`], for replacements that parse as code; others are left out.
    fn code<T: syn::parse::Parse>(&mut self, kind: Kind, span: Span) -> Vec<(u32, T)> {
        let mut found = Vec::new();
        for (id, text) in self.at(kind, span) {
            match syn::parse_str(&text) {
                Ok(code) => found.push((id, code)),
                Err(_) => _ = self.woven.remove(&id),
            }
        }
        found
    }

    fn body(&mut self, constant: bool, block: &mut Block) {
        let outer = self.constant;
        self.constant |= constant;
        let start = block.stmts.first().map(Spanned::span);
        visit_mut::visit_block_mut(self, block);
        if let Some(start) = start {
            let bodies = self.code::<Expr>(Kind::Body, start);
            let returns = bodies.iter().map(|(id, value)| -> syn::Stmt {
                parse_quote!(if crate::slat_mutant(#id) { return #value; })
            });
            block.stmts.splice(..0, returns.collect::<Vec<_>>());
        }
        self.constant = outer;
    }

    fn binary(&mut self, binary: &mut syn::ExprBinary) -> Option<Expr> {
        use BinOp::{
            AddAssign, And, BitAndAssign, BitOrAssign, BitXorAssign, DivAssign, MulAssign,
        };
        use BinOp::{Eq, Ge, Gt, Le, Lt, Ne, Or, RemAssign, ShlAssign, ShrAssign, SubAssign};
        let op = binary.op;
        let assigns = matches!(
            op,
            AddAssign(_)
                | SubAssign(_)
                | MulAssign(_)
                | DivAssign(_)
                | RemAssign(_)
                | BitXorAssign(_)
                | BitAndAssign(_)
                | BitOrAssign(_)
                | ShlAssign(_)
                | ShrAssign(_)
        );
        // The target of an assignment is a place, which no expression may replace.
        if !assigns {
            self.visit_expr_mut(&mut binary.left);
        }
        self.visit_expr_mut(&mut binary.right);
        if has_let(&binary.left) || has_let(&binary.right) {
            return None;
        }
        let others = self.code::<BinOp>(Kind::Operator, op.span());
        if others.is_empty() {
            return None;
        }
        let (l, r) = (&binary.left, &binary.right);
        let (ids, ops): (Vec<_>, Vec<_>) = others.into_iter().unzip();
        Some(match op {
            // The other operator is the only mutant: it evaluates the right side where this one
            // does not.
            And(_) => parse_quote!(({
                let l: bool = #l;
                if l ^ (#(crate::slat_mutant(#ids))|*) { #r } else { l }
            })),
            Or(_) => parse_quote!(({
                let l: bool = #l;
                if l ^ (#(crate::slat_mutant(#ids))|*) { l } else { #r }
            })),
            Eq(_) | Ne(_) | Lt(_) | Le(_) | Gt(_) | Ge(_) => parse_quote!((match (&(#l), &(#r)) {
                (l, r) => #(if crate::slat_mutant(#ids) { *l #ops *r } else)* { *l #op *r }
            })),
            _ if assigns => parse_quote!(({
                let r = #r;
                #(if crate::slat_mutant(#ids) { #l #ops r } else)* { #l #op r }
            })),
            _ => parse_quote!((match (#l, #r) {
                (l, r) => #(if crate::slat_mutant(#ids) { l #ops r } else)* { l #op r }
            })),
        })
    }

    fn unary(&mut self, unary: &mut syn::ExprUnary) -> Option<Expr> {
        let span = unary.op.span();
        self.visit_expr_mut(&mut unary.expr);
        let &[(id, _)] = &self.at(Kind::Operator, span)[..] else { return None };
        let (op, value) = (unary.op, &unary.expr);
        Some(parse_quote!((match #value {
            value => if crate::slat_mutant(#id) { value } else { #op value }
        })))
    }
}

impl VisitMut for Weaver<'_> {
    // Code that the compiler evaluates, and code that is no expression.
    fn visit_item_const_mut(&mut self, _: &mut syn::ItemConst) {}
    fn visit_item_static_mut(&mut self, _: &mut syn::ItemStatic) {}
    fn visit_impl_item_const_mut(&mut self, _: &mut syn::ImplItemConst) {}
    fn visit_trait_item_const_mut(&mut self, _: &mut syn::TraitItemConst) {}
    fn visit_type_mut(&mut self, _: &mut syn::Type) {}
    fn visit_generic_argument_mut(&mut self, _: &mut syn::GenericArgument) {}
    fn visit_pat_mut(&mut self, _: &mut Pat) {}
    fn visit_expr_const_mut(&mut self, _: &mut syn::ExprConst) {}
    fn visit_variant_mut(&mut self, _: &mut syn::Variant) {}
    fn visit_expr_repeat_mut(&mut self, repeat: &mut syn::ExprRepeat) {
        self.visit_expr_mut(&mut repeat.expr);
    }

    fn visit_item_fn_mut(&mut self, function: &mut syn::ItemFn) {
        self.body(function.sig.constness.is_some(), &mut function.block);
    }

    fn visit_impl_item_fn_mut(&mut self, function: &mut syn::ImplItemFn) {
        self.body(function.sig.constness.is_some(), &mut function.block);
    }

    fn visit_trait_item_fn_mut(&mut self, function: &mut syn::TraitItemFn) {
        if let Some(block) = &mut function.default {
            self.body(function.sig.constness.is_some(), block);
        }
    }

    fn visit_arm_mut(&mut self, arm: &mut syn::Arm) {
        let start = arm.span();
        let guard = arm.guard.as_ref().map(|(_, guard)| guard.span());
        visit_mut::visit_arm_mut(self, arm);
        if arm.guard.as_ref().is_some_and(|(_, guard)| has_let(guard)) {
            return;
        }
        if let (Some(span), Some((_, guard))) = (guard, &mut arm.guard) {
            for (id, value) in self.code::<Expr>(Kind::Guard, span) {
                **guard = parse_quote!(if crate::slat_mutant(#id) { #value } else { #guard });
            }
        }
        // Without its last arm no match compiles, and the compiler's complaint is about the match.
        if arm.guard.is_none() && takes_all(&arm.pat) {
            return;
        }
        for (id, _) in self.at(Kind::Arm, start) {
            let stays: Expr = match &arm.guard {
                Some((_, guard)) => parse_quote!(!crate::slat_mutant(#id) && (#guard)),
                None => parse_quote!(!crate::slat_mutant(#id)),
            };
            arm.guard = Some((Default::default(), Box::new(stays)));
        }
    }

    fn visit_expr_mut(&mut self, expression: &mut Expr) {
        let other = match expression {
            Expr::Binary(binary) => self.binary(binary),
            Expr::Unary(unary) if matches!(unary.op, UnOp::Not(_) | UnOp::Neg(_)) => {
                self.unary(unary)
            }
            _ => {
                visit_mut::visit_expr_mut(self, expression);
                return;
            }
        };
        if let Some(other) = other {
            *expression = other;
        }
    }
}

/// Returns whether a pattern is `_` or a name; constants are in capitals.
fn takes_all(pattern: &Pat) -> bool {
    match pattern {
        Pat::Wild(_) => true,
        Pat::Ident(name) if name.subpat.is_none() => {
            name.ident.to_string().starts_with(|first: char| !first.is_ascii_uppercase())
        }
        _ => false,
    }
}

/// Returns whether an expression binds names for the code that follows it.
fn has_let(expression: &Expr) -> bool {
    match expression {
        Expr::Let(_) => true,
        Expr::Binary(binary) => has_let(&binary.left) || has_let(&binary.right),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mutant(kind: Kind, line: usize, column: usize, replacement: &str) -> Mutant {
        let from = Place { line, column };
        let replacement = replacement.to_owned();
        Mutant { kind, from, to: from, replacement, ..Mutant::named("a.rs", "another") }
    }

    /// Returns the source with a mutant, without the spaces of a token stream.
    fn woven(source: &str, mutant: &Mutant) -> Option<String> {
        let (text, woven) = weave(source, &[(7, mutant)]).unwrap();
        syn::parse_file(&text).unwrap();
        woven.contains(&7).then(|| text.replace(' ', ""))
    }

    #[test]
    fn an_operator_asks_whether_it_is_another() {
        let source = "fn f(a: u8, b: u8) -> bool {\n    a < b\n}";
        let text = woven(source, &mutant(Kind::Operator, 2, 7, "<=")).unwrap();
        assert!(text.contains("ifcrate::slat_mutant(7u32){*l<=*r}else{*l<*r}"), "{text}");
        assert_eq!(woven(source, &mutant(Kind::Operator, 2, 8, "<=")), None);
    }

    #[test]
    fn a_body_an_arm_and_its_guard_ask() {
        let source = "fn f(a: u8) -> u8 {\n    match a {\n        1 if a > 0 => 2,\n        \
            _ => 3,\n    }\n}";
        let text = woven(source, &mutant(Kind::Body, 2, 5, "1")).unwrap();
        assert!(text.contains("{ifcrate::slat_mutant(7u32){return1;}matcha"), "{text}");
        let text = woven(source, &mutant(Kind::Arm, 3, 9, "")).unwrap();
        assert!(text.contains("1if!crate::slat_mutant(7u32)&&(a>0)=>2"), "{text}");
        let text = woven(source, &mutant(Kind::Guard, 3, 14, "true")).unwrap();
        assert!(text.contains("1ififcrate::slat_mutant(7u32){true}else{a>0}=>2"), "{text}");
    }

    #[test]
    fn an_arm_that_takes_all_the_rest_stays() {
        let source = |last: &str| {
            format!(
                "fn f(a: u8) -> u8 {{\n    match a {{\n        _ if a > 1 => 2,\n        {last} => 3,\n    }}\n}}"
            )
        };
        for last in ["_", "other"] {
            assert_eq!(woven(&source(last), &mutant(Kind::Arm, 4, 9, "")), None);
        }
        assert!(woven(&source("MOST"), &mutant(Kind::Arm, 4, 9, "")).is_some());
    }

    #[test]
    fn what_the_compiler_evaluates_asks_nothing() {
        let source = "const fn f(a: u8) -> bool {\n    a < 1\n}";
        assert_eq!(woven(source, &mutant(Kind::Operator, 2, 7, "<=")), None);
        let source = "fn f(a: Option<u8>) -> bool {\n    if let Some(1) = a && true {}\n}";
        assert_eq!(woven(source, &mutant(Kind::Operator, 2, 24, "||")), None);
    }

    #[test]
    fn a_place_in_the_text_is_of_the_mutant_before_it_or_within() {
        let source = "fn f(a: u8, b: u8) -> bool {\n    a < b\n}";
        let (text, _) = weave(source, &[(7, &mutant(Kind::Operator, 2, 7, "<="))]).unwrap();
        let other = text.find("<=").unwrap();
        assert_eq!(mutant_at(&text, other, other + 2), Some(7));
        let call = text.find("crate").unwrap();
        assert_eq!(mutant_at(&text, call, call + 27), Some(7));
        assert_eq!(mutant_at(&text, 0, 4), None);
    }
}
