//! Draws figures and limits over the size of the message, as SVG. Text is left to whoever shows the file, so no fonts are needed here.

use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, ensure};
use plotters::coord::Shift;
use plotters::prelude::*;

use super::measure::{Row, What};
use super::report::{digits, size};

/// One diagram.
pub struct Chart {
    /// Above it.
    pub title: String,
    /// Of the figures.
    pub unit: &'static str,
    /// In the order of the legend.
    pub series: Vec<Series>,
}

/// One line.
pub struct Series {
    /// In the legend.
    pub name: String,
    /// A limit, drawn thin and dashed.
    pub limit: bool,
    /// Bytes and figure, by bytes.
    pub points: Vec<(usize, f64)>,
}

const WIDTH: u32 = 1000;
const HEIGHT: u32 = 460;
/// Distinct for most kinds of colour vision (Okabe and Ito), without yellow, which is weak on white.
const COLOURS: [(u8, u8, u8); 7] =
    [(213, 94, 0), (0, 114, 178), (0, 158, 115), (86, 86, 86), (204, 121, 167), (86, 180, 233), (230, 159, 0)];

/// The diagrams of a table: throughput and half round trips, as far as there are any.
pub fn charts(plugins: &[impl AsRef<str>], rows: &[Row]) -> Vec<Chart> {
    let mut bulk = Chart { title: "Throughput".into(), unit: "GB/s", series: Vec::new() };
    let mut bounce = Chart { title: "Half round trip".into(), unit: "us", series: Vec::new() };
    let name = |index: usize| plugins.get(index).map_or("", AsRef::as_ref);
    // Said in the legend where it differs.
    let load = |row: &Row| match row.what {
        What::Bandwidth { outstanding, comms, .. } => Some((outstanding, comms)),
        What::Latency { .. } => None,
    };
    let first = rows.iter().find_map(load);
    let several = rows.iter().filter_map(load).any(|load| Some(load) != first);
    if let Some(row) = rows.iter().find(|row| load(row).is_some()) {
        bulk.title += row.what.manner();
    }
    if let (Some((outstanding, comms)), false) = (first, several) {
        bulk.title += &format!(", {outstanding} outstanding, {comms} comm{}", if comms == 1 { "" } else { "s" });
    }
    for row in rows {
        let (chart, suffix) = match row.what {
            What::Bandwidth { outstanding, comms, .. } => {
                (&mut bulk, if several { format!(", {outstanding} outstanding, {comms} comms") } else { String::new() })
            }
            What::Latency { .. } => (&mut bounce, String::new()),
        };
        for (index, plugin) in row.plugins.iter().enumerate() {
            chart.add(format!("{}{suffix}", name(index)), false, row.size(), plugin.figure.median);
        }
        for limit in &row.limits {
            if let Some(figure) = &limit.figure {
                let name = format!("{}{}", limit.name, if row.what.two_way() { ", one direction" } else { "" });
                chart.add(name, true, row.size(), figure.median);
            }
        }
    }
    [bulk, bounce].into_iter().filter(|chart| !chart.series.is_empty()).collect()
}

impl Chart {
    /// Adds a point, unless the series has one for this size. Nothing is drawn at 0: the scales are logarithmic.
    pub fn add(&mut self, name: String, limit: bool, bytes: usize, figure: f64) {
        if bytes == 0 || figure <= 0.0 {
            return;
        }
        let index = self.series.iter().position(|series| series.name == name).unwrap_or_else(|| {
            self.series.push(Series { name, limit, points: Vec::new() });
            self.series.len() - 1
        });
        let points = &mut self.series[index].points;
        if let Err(at) = points.binary_search_by_key(&bytes, |point| point.0) {
            points.insert(at, (bytes, figure));
        }
    }
}

/// A file that diagrams will be drawn into: opened before anything is measured, so that a bad path is noticed then. What stood in it stays
/// until there is something to draw, and a file made for nothing is removed.
pub struct Canvas {
    path: PathBuf,
    file: File,
    made_for_nothing: bool,
}

/// Whether a file is where standard output goes, and one of them would spoil the other: /dev/null and its like may be both.
fn is_standard_output(file: &File) -> anyhow::Result<bool> {
    let stdout = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    let [a, b] = [file.metadata()?, stdout.metadata()?];
    let same = (a.dev(), a.ino()) == (b.dev(), b.ino());
    Ok(same && (!a.file_type().is_char_device() || stdout.is_terminal()))
}

impl Canvas {
    /// Errors: the file cannot be written.
    pub fn open(path: &Path) -> anyhow::Result<Canvas> {
        let made = OpenOptions::new().write(true).create_new(true).open(path);
        let made_for_nothing = made.is_ok();
        let file = made.or_else(|_| OpenOptions::new().write(true).create(true).truncate(false).open(path));
        let file = file.with_context(|| format!("cannot write {}", path.display()))?;
        ensure!(!is_standard_output(&file)?, "--plot {}: that is standard output, where the figures go", path.display());
        Ok(Canvas { path: path.to_owned(), file, made_for_nothing })
    }

    /// Draws the diagrams one above the other, or says on standard error that there are none.
    pub fn draw(mut self, charts: &[Chart]) -> anyhow::Result<()> {
        if charts.is_empty() {
            eprintln!("railhead: {} is not drawn: the scales are logarithmic, and no figure is of more than 0 bytes", self.path.display());
            return Ok(());
        }
        let text = svg(charts)?;
        self.made_for_nothing = false;
        let regular = self.file.metadata().is_ok_and(|about| about.is_file());
        let emptied = if regular { self.file.set_len(0) } else { Ok(()) };
        emptied.and_then(|()| self.file.write_all(text.as_bytes())).with_context(|| format!("cannot write {}", self.path.display()))
    }
}

impl Drop for Canvas {
    fn drop(&mut self) {
        if self.made_for_nothing {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn svg(charts: &[Chart]) -> anyhow::Result<String> {
    let mut text = String::new();
    {
        let root = SVGBackend::with_string(&mut text, (WIDTH, HEIGHT * charts.len() as u32)).into_drawing_area();
        let drawn = || -> Result<(), Box<dyn std::error::Error>> {
            root.fill(&WHITE)?;
            for (area, chart) in root.split_evenly((charts.len(), 1)).iter().zip(charts) {
                one(area, chart)?;
            }
            root.present()?;
            Ok(())
        };
        drawn().map_err(|e| anyhow!("cannot draw: {e}"))?;
    }
    Ok(text)
}

fn one(area: &DrawingArea<SVGBackend, Shift>, chart: &Chart) -> Result<(), Box<dyn std::error::Error>> {
    let points = || chart.series.iter().flat_map(|series| &series.points);
    let range = |values: &mut dyn Iterator<Item = f64>| values.fold((f64::MAX, f64::MIN), |(low, high), v| (low.min(v), high.max(v)));
    let (left, right) = range(&mut points().map(|p| (p.0 as f64).log2()));
    let (low, high) = range(&mut points().map(|p| p.1));
    let (x, y) = (left..right.max(left + 1.0), (low * 0.7)..(high * 1.5));
    let mut context = ChartBuilder::on(area)
        .caption(format!("{} ({})", chart.title, chart.unit), ("sans-serif", 18))
        .margin(12)
        // Half of the last size's name.
        .margin_right(36)
        .x_label_area_size(36)
        .y_label_area_size(56)
        .build_cartesian_2d(x, y.log_scale())?;
    context
        .configure_mesh()
        .x_labels((right - left) as usize + 1)
        .x_label_formatter(&|v| size(v.exp2().round() as usize))
        .y_label_formatter(&|v| digits(*v))
        .x_desc("bytes per message")
        .light_line_style(BLACK.mix(0.05))
        .bold_line_style(BLACK.mix(0.12))
        .label_style(("sans-serif", 12))
        .draw()?;
    for (index, series) in chart.series.iter().enumerate() {
        let (red, green, blue) = COLOURS[index % COLOURS.len()];
        let colour = RGBColor(red, green, blue);
        let style = colour.stroke_width(if series.limit { 1 } else { 2 });
        let points: Vec<(f64, f64)> = series.points.iter().map(|&(bytes, figure)| ((bytes as f64).log2(), figure)).collect();
        let key = move |(x, y)| PathElement::new(vec![(x, y), (x + 18, y)], style);
        if series.limit {
            context.draw_series(DashedLineSeries::new(points, 5, 4, style))?.label(&series.name).legend(key);
        } else {
            context.draw_series(LineSeries::new(points.clone(), style))?.label(&series.name).legend(key);
            context.draw_series(points.into_iter().map(|point| Circle::new(point, 3, colour.filled())))?;
        }
    }
    context
        .configure_series_labels()
        .position(if chart.unit == "us" { SeriesLabelPosition::UpperLeft } else { SeriesLabelPosition::LowerRight })
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.3))
        .label_font(("sans-serif", 12))
        .draw()?;
    Ok(())
}
