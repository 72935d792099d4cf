//! Finds what can be changed in the sources.

use std::{
    fmt::{self, Display},
    fs,
    ops::Range,
    path::Path,
};

use proc_macro2::Span;
use syn::{
    Attribute, Expr, Stmt, Type,
    spanned::Spanned,
    visit::{self, Visit},
};

use crate::{Error, operators};

/// A change in one place.
#[derive(Clone, PartialEq, Eq)]
pub struct Mutant {
    /// Path below the package's `src`.
    pub file: String,
    pub line: usize,
    /// The bytes of the file that the change replaces.
    pub range: Range<usize>,
    /// What stands in their place.
    pub changed: String,
    /// What stands there now, in one line.
    pub original: String,
    /// The line of source that it begins in.
    pub source: String,
    pub form: Form,
}

/// Where a change stands.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Form {
    Expression,
    Statement,
    /// At the start of a function's body, with nothing replaced.
    Body,
}

impl Display for Mutant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file, self.line, self.change())
    }
}

impl Mutant {
    /// What is changed into what, in one line.
    pub fn change(&self) -> String {
        let changed = if self.changed.is_empty() { "(left out)" } else { &one_line(&self.changed) };
        format!("{} -> {changed}", self.original)
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Every mutant of the files in `folder` whose path contains `only`.
pub fn in_folder(folder: &Path, only: Option<&str>) -> Result<Vec<Mutant>, Error> {
    let mut mutants = Vec::new();
    for file in files(folder)? {
        let name = file.strip_prefix(folder)?.to_string_lossy().into_owned();
        // Tests of a module in a file of their own.
        let tests = file.file_name().is_some_and(|name| name == "tests.rs");
        if !tests && only.is_none_or(|only| name.contains(only)) {
            mutants.extend(in_text(&name, &fs::read_to_string(&file)?)?);
        }
    }
    Ok(mutants)
}

/// The Rust files in `folder` and below, in order.
pub fn files(folder: &Path) -> Result<Vec<std::path::PathBuf>, Error> {
    let mut entries = fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>, Error>>()?;
    entries.sort();
    let mut found = Vec::new();
    for path in entries {
        match path.is_dir() {
            true => found.extend(files(&path)?),
            false if path.extension().is_some_and(|e| e == "rs") => found.push(path),
            false => {}
        }
    }
    Ok(found)
}

pub fn in_text(file: &str, text: &str) -> Result<Vec<Mutant>, Error> {
    let tree = syn::parse_file(text).map_err(|e| format!("{file}: {e}"))?;
    let mut finder = Finder { file, text, mutants: Vec::new() };
    finder.visit_file(&tree);
    Ok(finder.mutants)
}

struct Finder<'a> {
    file: &'a str,
    text: &'a str,
    mutants: Vec<Mutant>,
}

impl Finder<'_> {
    fn text(&self, span: Span) -> &str {
        &self.text[span.byte_range()]
    }

    fn note(&mut self, span: Span, changed: String, form: Form) {
        let original = one_line(self.text(span));
        self.note_at(span.start().line, span.byte_range(), original, changed, form);
    }

    fn note_at(&mut self, line: usize, range: Range<usize>, original: String, changed: String, form: Form) {
        let source = self.text.lines().nth(line - 1).unwrap_or_default().trim().into();
        self.mutants.push(Mutant { file: self.file.into(), line, range, changed, original, source, form });
    }

    /// The condition of an `if`, turned round; not one that binds names.
    fn negate(&mut self, cond: &Expr) {
        let binds = |cond: &Expr| {
            let mut lets = Lets(false);
            lets.visit_expr(cond);
            lets.0
        };
        // Comparisons, `!x` and the like are turned round by their own rules.
        if !binds(cond) && !matches!(cond, Expr::Binary(_) | Expr::Unary(_) | Expr::Lit(_)) {
            self.note(cond.span(), format!("!({})", self.text(cond.span())), Form::Expression);
        }
    }

    /// A small function that answers yes or no always answers the same.
    fn answers(&mut self, signature: &syn::Signature, body: &syn::Block) {
        let is_bool = |ty: &Type| matches!(ty, Type::Path(path) if path.path.is_ident("bool"));
        if let syn::ReturnType::Type(_, ty) = &signature.output
            && is_bool(ty)
            && signature.constness.is_none()
        {
            let at = body.brace_token.span.open().byte_range().end;
            for answer in ["true", "false"] {
                let original = format!("fn {}", signature.ident);
                let line = signature.span().start().line;
                self.note_at(line, at..at, original, format!("return {answer};"), Form::Body);
            }
        }
    }

    /// Whether a function of this signature is left as it is: constant, unsafe, or about the size of scratch memory, of
    /// which too little panics and too much changes no result.
    fn is_left(signature: &syn::Signature) -> bool {
        let name = signature.ident.to_string();
        let sizes = ["work", "sizes", "memory", "room"];
        signature.constness.is_some()
            || signature.unsafety.is_some()
            || sizes.iter().any(|size| name == *size || name.ends_with(&format!("_{size}")))
    }
}

/// Whether an item is compiled for tests or for another processor.
fn elsewhere(attributes: &[Attribute]) -> bool {
    attributes.iter().filter(|attribute| attribute.path().is_ident("cfg")).any(|attribute| {
        let text = attribute.meta.require_list().map(|list| list.tokens.to_string()).unwrap_or_default();
        text.contains("test") || text.contains("aarch64") || text.contains("not")
    })
}

/// Whether there is a `let` in a condition.
struct Lets(bool);

impl<'a> Visit<'a> for Lets {
    fn visit_expr_let(&mut self, _: &'a syn::ExprLet) {
        self.0 = true;
    }
}

impl<'a> Visit<'a> for Finder<'_> {
    // Constants, types, patterns and attributes take no switch.
    fn visit_item_const(&mut self, _: &'a syn::ItemConst) {}
    fn visit_item_static(&mut self, _: &'a syn::ItemStatic) {}
    fn visit_impl_item_const(&mut self, _: &'a syn::ImplItemConst) {}
    fn visit_trait_item_const(&mut self, _: &'a syn::TraitItemConst) {}
    fn visit_item_enum(&mut self, _: &'a syn::ItemEnum) {}
    fn visit_expr_const(&mut self, _: &'a syn::ExprConst) {}
    fn visit_type(&mut self, _: &'a Type) {}
    fn visit_generics(&mut self, _: &'a syn::Generics) {}
    fn visit_generic_argument(&mut self, _: &'a syn::GenericArgument) {}
    fn visit_pat(&mut self, _: &'a syn::Pat) {}
    fn visit_attribute(&mut self, _: &'a Attribute) {}
    // What is changed there may be undefined.
    fn visit_expr_unsafe(&mut self, _: &'a syn::ExprUnsafe) {}

    fn visit_item_mod(&mut self, item: &'a syn::ItemMod) {
        if !elsewhere(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_impl(&mut self, item: &'a syn::ItemImpl) {
        if !elsewhere(&item.attrs) {
            visit::visit_item_impl(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'a syn::ItemFn) {
        if !elsewhere(&item.attrs) && !Self::is_left(&item.sig) {
            self.answers(&item.sig, &item.block);
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'a syn::ImplItemFn) {
        if !elsewhere(&item.attrs) && !Self::is_left(&item.sig) {
            self.answers(&item.sig, &item.block);
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_trait_item_fn(&mut self, item: &'a syn::TraitItemFn) {
        if !elsewhere(&item.attrs) && !Self::is_left(&item.sig) {
            visit::visit_trait_item_fn(self, item);
        }
    }

    fn visit_arm(&mut self, arm: &'a syn::Arm) {
        if !elsewhere(&arm.attrs) {
            visit::visit_arm(self, arm);
        }
    }

    fn visit_expr_repeat(&mut self, repeat: &'a syn::ExprRepeat) {
        self.visit_expr(&repeat.expr);
    }

    fn visit_expr_block(&mut self, block: &'a syn::ExprBlock) {
        if !elsewhere(&block.attrs) {
            visit::visit_expr_block(self, block);
        }
    }

    fn visit_stmt(&mut self, stmt: &'a Stmt) {
        if let Stmt::Expr(expr, Some(_)) = stmt {
            let written = match expr {
                Expr::MethodCall(call) => operators::is_write(&call.method.to_string()),
                // As a statement, a binary operator assigns. (Without a plain assignment a name might hold nothing.)
                Expr::Binary(_) => true,
                _ => false,
            };
            if written {
                self.note(stmt.span(), String::new(), Form::Statement);
            }
        }
        visit::visit_stmt(self, stmt);
    }

    fn visit_expr_binary(&mut self, binary: &'a syn::ExprBinary) {
        if let Some(op) = operators::binary(&binary.op) {
            let (left, right) = (self.text(binary.left.span()), self.text(binary.right.span()));
            let changed = format!("{left} {op} {right}");
            self.note(binary.span(), changed, Form::Expression);
        }
        visit::visit_expr_binary(self, binary);
    }

    fn visit_expr_unary(&mut self, unary: &'a syn::ExprUnary) {
        if !matches!(unary.op, syn::UnOp::Deref(_)) {
            let changed = self.text(unary.expr.span()).to_owned();
            self.note(unary.span(), changed, Form::Expression);
        }
        visit::visit_expr_unary(self, unary);
    }

    fn visit_expr_method_call(&mut self, call: &'a syn::ExprMethodCall) {
        if let Some(other) = operators::method(&call.method.to_string()) {
            let (whole, name) = (call.span().byte_range(), call.method.span().byte_range());
            let changed = format!("{}{other}{}", &self.text[whole.start..name.start], &self.text[name.end..whole.end]);
            self.note(call.span(), changed, Form::Expression);
        }
        visit::visit_expr_method_call(self, call);
    }

    fn visit_expr_lit(&mut self, lit: &'a syn::ExprLit) {
        if let Some(changed) = operators::literal(&lit.lit) {
            self.note(lit.span(), changed, Form::Expression);
        }
    }

    fn visit_expr_if(&mut self, branch: &'a syn::ExprIf) {
        self.negate(&branch.cond);
        visit::visit_expr_if(self, branch);
    }
}
