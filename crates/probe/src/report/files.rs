//! The files of analyses, fits and explanations.

use std::path::{Path, PathBuf};

use resolvent_lab::{Error, Result, disk::write_atomically, folder::REPORT};
use serde_json::json;

use super::{analysis_page, explanation_page, fit_page, panel_page};
use crate::{
    analyze::{Analysis, Fit},
    explain::{Explanation, RESULTS, overlay},
    subject::Example,
};

/// The folder, within that of an explanation, of maps laid over pictures.
pub const OVERLAYS: &str = "overlays";

/// Writes the report of an analysis into its folder. Returns where it is.
///
/// # Errors
/// [`Error::Io`].
pub fn write_analysis(folder: &Path, analysis: &Analysis) -> Result<PathBuf> {
    write_page(folder, &analysis_page(analysis))
}

/// Writes the report of a fit into its folder. Returns where it is.
///
/// # Errors
/// [`Error::Io`].
pub fn write_fit(folder: &Path, fit: &Fit) -> Result<PathBuf> {
    write_page(folder, &fit_page(fit))
}

/// Writes `results.json`, the report, and for each picture shown `overlays/NUMBER.png` with the map that is scored; what an earlier
/// explanation left there is removed. Returns where the report is.
///
/// # Errors
/// [`Error::Io`].
pub fn write_explanation(folder: &Path, explanation: &Explanation) -> Result<PathBuf> {
    let overlays = folder.join(OVERLAYS);
    remove(&overlays).map_err(Error::io(&overlays, "cannot be replaced"))?;
    for (index, shown) in explanation.shown.iter().enumerate() {
        let maps = shown.layers.iter().find(|maps| maps.layer == explanation.layer);
        if let (Example::Picture(picture), Some(maps)) = (&shown.example, maps)
            && let Some(grid) = maps.grid
        {
            std::fs::create_dir_all(&overlays).map_err(Error::io(&overlays, "cannot make the folder"))?;
            let png = overlay::overlay(picture, &maps.mean, grid);
            write_atomically(&overlays.join(format!("{}.png", index + 1)), &png)?;
        }
    }
    let file = folder.join(RESULTS);
    let json = serde_json::to_string_pretty(explanation).map_err(|e| Error::damaged(&file, e.to_string()))?;
    write_atomically(&file, format!("{json}\n").as_bytes())?;
    write_page(folder, &explanation_page(explanation))
}

/// Writes what several models look at in the same examples: each explanation into a folder of the model's name within `folder`, and there
/// `results.json` with the scores of all, and the report with their maps side by side. Returns where that is.
///
/// # Errors
/// [`Error::Io`].
pub fn write_panel(folder: &Path, models: &[(String, Explanation)]) -> Result<PathBuf> {
    let overlays = folder.join(OVERLAYS);
    remove(&overlays).map_err(Error::io(&overlays, "cannot be replaced"))?;
    for (name, explanation) in models {
        let own = folder.join(name);
        std::fs::create_dir_all(&own).map_err(Error::io(&own, "cannot make the folder"))?;
        write_explanation(&own, explanation)?;
    }
    let of = |(name, e): &(String, Explanation)| json!({"name": name, "checkpoint": e.checkpoint, "mechanism": e.mechanism, "layer": e.layer, "map_rule": e.map_rule, "examples": e.examples, "maps": e.maps, "layers": e.layers});
    let file = folder.join(RESULTS);
    let json = json!({"models": models.iter().map(of).collect::<Vec<_>>()});
    write_atomically(&file, format!("{json:#}\n").as_bytes())?;
    write_page(folder, &panel_page(models))
}

fn write_page(folder: &Path, page: &str) -> Result<PathBuf> {
    let report = folder.join(REPORT);
    write_atomically(&report, page.as_bytes())?;
    Ok(report)
}

/// Removes what an earlier explanation left in `overlays`: pictures with numbers for names, and nothing else.
fn remove(overlays: &Path) -> std::io::Result<()> {
    let files = match std::fs::read_dir(overlays) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        files => files?.collect::<std::io::Result<Vec<_>>>()?,
    };
    let ours = |path: &Path| {
        let number = path.file_stem().is_some_and(|stem| stem.to_string_lossy().parse::<usize>().is_ok());
        number && path.extension().is_some_and(|extension| extension == "png")
    };
    let (old, others): (Vec<PathBuf>, Vec<PathBuf>) =
        files.iter().map(std::fs::DirEntry::path).partition(|path| ours(path));
    old.iter().try_for_each(std::fs::remove_file)?;
    if others.is_empty() { std::fs::remove_dir(overlays) } else { Ok(()) }
}
