//! A changed map layout needs a new LAYOUT_VERSION.
//!
//! `common/layout.txt` holds the version and, as text, everything in
//! `common/src` that the bytes in the maps depend on: types with a `repr`, map
//! names, capacities, bits. If that text changes and the version does not,
//! programs would read the pinned maps of an older shunt in the wrong way.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use quote::ToTokens;
use syn::{
    Attribute, Expr, Ident, ImplItem, Item, ItemEnum, ItemImpl, ItemStruct, Type, Visibility,
};

use crate::command::root;

const RECORD: &str = "common/layout.txt";
const SOURCES: &str = "common/src";
const VERSION: &str = "LAYOUT_VERSION";
/// The types of map names, capacities and bits.
const CONSTANTS: [&str; 3] = ["&str", "usize", "u8"];

/// What is recorded.
#[derive(Debug, Eq, PartialEq)]
struct Layout {
    version: String,
    /// One definition on each line.
    definitions: Vec<String>,
}

/// Fails if the layout is another than the recorded one.
pub(super) fn check() -> Result<()> {
    compare(&Layout::recorded()?, &Layout::of_sources()?)
}

/// Records the present layout, unless that hides a change.
pub(super) fn update() -> Result<()> {
    let present = Layout::of_sources()?;
    if let Ok(recorded) = Layout::recorded() {
        ensure_raised(&recorded, &present)?;
    }
    fs::write(root().join(RECORD), present.text()).context(RECORD)?;
    println!("{RECORD} holds layout {}", present.version);
    Ok(())
}

fn compare(recorded: &Layout, present: &Layout) -> Result<()> {
    ensure_raised(recorded, present)?;
    ensure!(
        recorded == present,
        "{RECORD} is of layout {}, the sources are of {}: run `cargo xtask lint --update-layout`",
        recorded.version,
        present.version
    );
    Ok(())
}

fn ensure_raised(recorded: &Layout, present: &Layout) -> Result<()> {
    if recorded.version != present.version || recorded.definitions == present.definitions {
        return Ok(());
    }
    let only_in = |sign: &str, a: &Layout, b: &Layout| {
        let only = a
            .definitions
            .iter()
            .filter(|it| !b.definitions.contains(it));
        only.map(|it| format!("\n  {sign} {it}"))
            .collect::<String>()
    };
    bail!(
        "the map layout changed, but {VERSION} is still {}: raise it in {SOURCES}/lib.rs and run \
         `cargo xtask lint --update-layout`{}{}",
        present.version,
        only_in("-", recorded, present),
        only_in("+", present, recorded),
    )
}

impl Layout {
    fn recorded() -> Result<Self> {
        let text = fs::read_to_string(root().join(RECORD)).with_context(|| {
            format!("read {RECORD}; `cargo xtask lint --update-layout` makes it")
        })?;
        let mut lines = text.lines().map(str::to_owned);
        let version = lines.next().with_context(|| format!("{RECORD} is empty"))?;
        Ok(Self {
            version,
            definitions: lines.collect(),
        })
    }

    fn of_sources() -> Result<Self> {
        let mut sources = Vec::new();
        for path in source_files(&root().join(SOURCES))? {
            let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            sources.push(text);
        }
        Self::of(&sources)
    }

    fn of(sources: &[String]) -> Result<Self> {
        let mut layout = Self {
            version: String::new(),
            definitions: Vec::new(),
        };
        for source in sources {
            layout.add(syn::parse_file(source)?.items, "");
        }
        ensure!(!layout.version.is_empty(), "no {VERSION} in {SOURCES}");
        layout.definitions.sort();
        Ok(layout)
    }

    /// `path` is the module's, with `::` at its end.
    fn add(&mut self, items: Vec<Item>, path: &str) {
        for item in items {
            match item {
                Item::Const(it) if it.ident == VERSION => self.version = text_of(&it.expr),
                Item::Const(it) => self.add_constant(path, &it.vis, &it.ident, &it.ty, &it.expr),
                Item::Struct(it) => self.add_struct(it),
                Item::Enum(it) => self.add_enum(it),
                Item::Impl(it) if it.trait_.is_none() => self.add_constants_of(it),
                Item::Mod(it) => {
                    let path = format!("{path}{}::", it.ident);
                    let items = it.content.map(|(_, items)| items);
                    self.add(items.unwrap_or_default(), &path);
                }
                _ => {}
            }
        }
    }

    fn add_struct(&mut self, mut it: ItemStruct) {
        if keep_repr(&mut it.attrs) {
            it.vis = Visibility::Inherited;
            for field in &mut it.fields {
                field.attrs.clear();
                field.vis = Visibility::Inherited;
            }
            self.definitions.push(text_of(&it));
        }
    }

    fn add_enum(&mut self, mut it: ItemEnum) {
        if keep_repr(&mut it.attrs) {
            it.vis = Visibility::Inherited;
            it.variants
                .iter_mut()
                .for_each(|variant| variant.attrs.clear());
            self.definitions.push(text_of(&it));
        }
    }

    /// Bits and numbers that values consist of.
    fn add_constants_of(&mut self, it: ItemImpl) {
        let path = format!("{}::", text_of(&it.self_ty));
        for item in it.items {
            if let ImplItem::Const(it) = item {
                self.add_constant(&path, &it.vis, &it.ident, &it.ty, &it.expr);
            }
        }
    }

    /// Only public ones of the types that names, sizes and bits have.
    fn add_constant(
        &mut self,
        path: &str,
        vis: &Visibility,
        name: &Ident,
        ty: &Type,
        value: &Expr,
    ) {
        let is_public = matches!(vis, Visibility::Public(_));
        if is_public && CONSTANTS.contains(&text_of(ty).as_str()) {
            self.definitions
                .push(format!("{path}{name} = {}", text_of(value)));
        }
    }

    fn text(&self) -> String {
        format!("{}\n{}\n", self.version, self.definitions.join("\n"))
    }
}

fn source_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            files.extend(source_files(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(files)
}

/// Drops all attributes but `repr`; whether there is one.
fn keep_repr(attributes: &mut Vec<Attribute>) -> bool {
    attributes.retain(|attribute| attribute.path().is_ident("repr"));
    !attributes.is_empty()
}

/// The tokens, whatever the source's spaces and comments were.
fn text_of(tokens: &impl ToTokens) -> String {
    let text = tokens.to_token_stream().to_string();
    let tidy = [
        ("# [", "#["),
        (" (", "("),
        (" :", ":"),
        (" ;", ";"),
        (" ,", ","),
        (", }", " }"),
        ("& ", "&"),
    ];
    tidy.iter()
        .fold(text, |text, (from, to)| text.replace(from, to))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "
        /// Version.
        pub const LAYOUT_VERSION: u32 = 3;
        pub mod capacity { /// Few.
            pub const FEW: usize = 8; }
        /// A key.
        #[repr(C)]
        #[derive(Clone)]
        pub struct Key { /// Port.
            pub port: [u8; 2], }
        impl Key { /// TCP.
            pub const TCP: u8 = 6; }
        pub struct NotShared(u64);
        pub const ADDRESS: [u8; 1] = [1];
    ";

    fn layout(source: &str) -> Layout {
        Layout::of(&[source.to_owned()]).unwrap()
    }

    #[test]
    fn only_what_maps_depend_on_is_recorded() {
        let expected = [
            "#[repr(C)] struct Key { port: [u8; 2] }",
            "Key::TCP = 6",
            "capacity::FEW = 8",
        ];
        let expected = expected.map(str::to_owned);
        let expected = Layout {
            version: "3".to_owned(),
            definitions: expected.into(),
        };
        assert_eq!(layout(SOURCE), expected);
    }

    #[test]
    fn comments_and_spaces_change_nothing() {
        let other = SOURCE
            .replace("/// Port.", "/// The port.\n\n")
            .replace("u8; 2", "u8;2");
        compare(&layout(SOURCE), &layout(&other)).unwrap();
    }

    #[test]
    fn a_change_without_a_new_version_is_shown() {
        let other = SOURCE.replace("port: [u8; 2]", "port: u16");
        let error = compare(&layout(SOURCE), &layout(&other))
            .unwrap_err()
            .to_string();
        assert!(error.contains("LAYOUT_VERSION is still 3"), "{error}");
        assert!(
            error.contains("\n  + #[repr(C)] struct Key { port: u16 }"),
            "{error}"
        );
    }

    #[test]
    fn a_new_version_has_to_be_recorded() {
        let other = SOURCE.replace("= 3", "= 4");
        let error = compare(&layout(SOURCE), &layout(&other))
            .unwrap_err()
            .to_string();
        assert!(error.contains("--update-layout"), "{error}");
    }
}
