//! The recipes that are built in: the files of `configs/`.

macro_rules! built_in {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../configs/", $name, ".toml")))),*]
    };
}

/// Names and texts, in order.
const RECIPES: &[(&str, &str)] = built_in![
    "cifar10",
    "cifar10-fna",
    "fashion-mnist",
    "gpt2-medium",
    "imdb",
    "imdb-full",
    "imdb-paper",
    "infvit-linear-4",
    "language",
    "language-alternating",
    "laplacian-mini",
    "laplacian-tiny",
    "listops",
    "lra-image",
    "lra-image-small",
    "lra-listops",
    "lra-listops-small",
    "lra-pathfinder",
    "lra-pathfinder-x",
    "lra-retrieval",
    "lra-retrieval-small",
    "lra-text",
    "lra-text-small",
    "mqar",
    "mqar-paper",
    "multi30k",
    "multi30k-small",
    "pictures",
    "shakespeare-char",
    "shapes",
    "shapes-maps",
    "soft-mini",
    "soft-tiny",
    "text",
];

/// The names of the built-in recipes.
pub fn names() -> impl Iterator<Item = &'static str> {
    RECIPES.iter().map(|(name, _)| *name)
}

/// The built-in recipe `name` as it is written.
pub fn text(name: &str) -> Option<&'static str> {
    RECIPES.iter().find(|(own, _)| *own == name).map(|(_, text)| *text)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::Recipe;
    use super::*;

    #[test]
    fn every_file_is_built_in_and_valid() {
        let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/configs"));
        let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let mut stems: Vec<_> = files.map(|file| file.file_stem().unwrap().to_string_lossy().into_owned()).collect();
        stems.sort();
        assert_eq!(stems, names().collect::<Vec<_>>());
        for name in names() {
            let recipe = Recipe::built_in(name).unwrap();
            assert!(!recipe.about.is_empty() && recipe.name == name, "{name}");
            assert_eq!(Recipe::load(&folder.join(format!("{name}.toml"))).unwrap(), recipe);
            assert_eq!(Recipe::from_toml(&recipe.to_toml().unwrap(), "again").unwrap(), recipe);
        }
    }
}
