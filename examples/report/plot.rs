//! Curves as SVG; and throughput against the batch.

use std::path::{Path, PathBuf};

use anyhow::{anyhow, Context, Result};
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;

use crate::kernels::{floor, name, us, Peers, MODES};
use crate::lines::Run;

pub const GREY: RGBColor = RGBColor(0x80, 0x80, 0x80);
pub const COLORS: [RGBColor; 3] = [
    RGBColor(0x1f, 0x77, 0xb4),
    RGBColor(0xd6, 0x27, 0x28),
    RGBColor(0x2c, 0xa0, 0x2c),
];

/// Points of a curve, and how it is drawn.
pub struct Curve {
    pub label: String,
    pub points: Vec<(f64, f64)>,
    pub style: ShapeStyle,
}

impl Curve {
    /// What a plot is about.
    pub fn main(label: impl Into<String>, color: RGBColor, points: Vec<(f64, f64)>) -> Self {
        Self::new(label.into(), color.stroke_width(2), points)
    }

    /// What it is held against.
    pub fn beside(label: impl Into<String>, color: RGBColor, points: Vec<(f64, f64)>) -> Self {
        Self::new(label.into(), color.mix(0.4).stroke_width(1), points)
    }

    fn new(label: String, style: ShapeStyle, mut points: Vec<(f64, f64)>) -> Self {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        points.dedup_by_key(|point| point.0);
        Self {
            label,
            points,
            style,
        }
    }
}

/// Plots in a folder.
pub struct Plots<'a> {
    folder: &'a Path,
    pub files: Vec<PathBuf>,
}

impl<'a> Plots<'a> {
    pub fn new(folder: &'a Path) -> Self {
        Self {
            folder,
            files: Vec::new(),
        }
    }

    /// Draws the curves that have any length, and nothing where none has.
    pub fn draw(
        &mut self,
        name: &str,
        title: &str,
        axes: Axes,
        mut curves: Vec<Curve>,
    ) -> Result<()> {
        curves.retain(|curve| curve.points.len() > 1);
        if !curves.is_empty() {
            let file = self.folder.join(format!("{name}.svg"));
            chart(&file, title, axes, &curves)?;
            self.files.push(file);
        }
        Ok(())
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    Linear,
    Logarithmic,
}

/// What the axes say, and how they are divided.
#[derive(Clone, Copy)]
pub struct Axes<'a> {
    pub x: (&'a str, Scale),
    pub y: (&'a str, Scale),
}

impl<'a> Axes<'a> {
    pub fn logarithmic(x: &'a str, y: &'a str) -> Self {
        Self {
            x: (x, Scale::Logarithmic),
            y: (y, Scale::Logarithmic),
        }
    }

    pub fn linear(x: &'a str, y: &'a str) -> Self {
        Self {
            x: (x, Scale::Linear),
            y: (y, Scale::Linear),
        }
    }
}

/// Rows a second.
fn rate(batch: u64, us: f64) -> f64 {
    batch as f64 / us * 1e6
}

/// A file for each op at the least and the greatest vocabulary, f32.
pub fn draw(run: &Run, peers: &Peers, folder: &Path) -> Result<Vec<PathBuf>> {
    let drawn = |l: &crate::lines::Line| l.text("dtype") == "f32" && l.text("dist") == "peaked";
    let mut widths: Vec<_> = run
        .lines
        .iter()
        .filter(|l| drawn(l))
        .map(|l| l.int("v"))
        .collect();
    widths.sort();
    widths.dedup();
    let mut files = Vec::new();
    let ends = [widths.first(), widths.last()];
    for &v in ends.iter().flatten().take(widths.len().min(2)) {
        let mut ops: Vec<_> = run
            .lines
            .iter()
            .filter(|l| drawn(l))
            .map(|l| name(l))
            .collect();
        ops.sort();
        ops.dedup();
        for op in ops {
            let lines = || {
                let of =
                    move |l: &&&crate::lines::Line| drawn(l) && l.int("v") == *v && name(l) == op;
                run.lines.iter().filter(of)
            };
            let mut curves = Vec::new();
            let limit = lines().map(|l| (l.int("b"), rate(l.int("b"), floor(l))));
            curves.push(Curve {
                label: match op.starts_with("mask") {
                    true => "copy floor".to_string(),
                    false => "read floor".to_string(),
                },
                points: ascending(limit),
                style: BLACK.mix(0.4).stroke_width(1),
            });
            for (mode, color) in MODES.into_iter().zip(COLORS) {
                let ours = lines().filter(|l| l.text("mode") == mode);
                curves.push(Curve {
                    label: mode.to_string(),
                    points: ascending(ours.map(|l| (l.int("b"), rate(l.int("b"), us(l))))),
                    style: color.stroke_width(2),
                });
                let matching = |peer: &&crate::kernels::Peer| lines().any(|l| peer.matches(l));
                for peer in peers.peers.iter().filter(matching) {
                    let cells = peer
                        .cells
                        .iter()
                        .filter(|c| c.v.abs_diff(*v) * 1000 <= *v && c.mode == mode);
                    curves.push(Curve {
                        label: format!("{mode}, {}", peer.name),
                        points: ascending(cells.map(|c| (c.b, rate(c.b, c.us)))),
                        style: color.mix(0.4).stroke_width(1),
                    });
                }
            }
            curves.retain(|curve| !curve.points.is_empty());
            let file = folder.join(format!("{}-{v}.svg", op.replace(' ', "-")));
            let title = format!("{op}, f32, V = {v}");
            chart(
                &file,
                &title,
                Axes::logarithmic("batch", "rows a second"),
                &curves,
            )?;
            files.push(file);
        }
    }
    Ok(files)
}

fn ascending(points: impl Iterator<Item = (u64, f64)>) -> Vec<(f64, f64)> {
    let mut points: Vec<_> = points.collect();
    points.sort_by_key(|point| point.0);
    points.dedup_by_key(|point| point.0);
    points
        .into_iter()
        .map(|(b, rate)| (b as f64, rate))
        .collect()
}

/// Draws the curves into a file.
fn chart(file: &Path, title: &str, axes: Axes, curves: &[Curve]) -> Result<()> {
    let range = |of: fn(&(f64, f64)) -> f64, scale: Scale| {
        let values = || curves.iter().flat_map(|curve| &curve.points).map(of);
        let least = values().fold(f64::INFINITY, f64::min);
        let most = values().fold(f64::NEG_INFINITY, f64::max);
        // An axis needs some length.
        match scale {
            Scale::Logarithmic => least / 1.25..most * 1.25,
            Scale::Linear => {
                let room = ((most - least) * 0.05).max(1e-3);
                least - room..most + room
            }
        }
    };
    let (x, y) = (range(|p| p.0, axes.x.1), range(|p| p.1, axes.y.1));
    use Scale::{Linear, Logarithmic};
    match (axes.x.1, axes.y.1) {
        (Linear, Linear) => on(file, title, axes, curves, x, y),
        (Linear, Logarithmic) => on(file, title, axes, curves, x, y.log_scale()),
        (Logarithmic, Linear) => on(file, title, axes, curves, x.log_scale(), y),
        (Logarithmic, Logarithmic) => on(file, title, axes, curves, x.log_scale(), y.log_scale()),
    }
    .with_context(|| format!("cannot draw {}", file.display()))
}

fn on<X, Y>(file: &Path, title: &str, axes: Axes, curves: &[Curve], x: X, y: Y) -> Result<()>
where
    X: AsRangedCoord<Value = f64, CoordDescType: ValueFormatter<f64>>,
    Y: AsRangedCoord<Value = f64, CoordDescType: ValueFormatter<f64>>,
{
    let failed = |e: DrawingAreaErrorKind<_>| anyhow!("{e}");
    let area = SVGBackend::new(file, (760, 480)).into_drawing_area();
    area.fill(&WHITE).map_err(failed)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(70)
        .build_cartesian_2d(x, y)
        .map_err(failed)?;
    chart
        .configure_mesh()
        .x_desc(axes.x.0)
        .y_desc(axes.y.0)
        .x_label_formatter(&label)
        .y_label_formatter(&label)
        .light_line_style(TRANSPARENT)
        .draw()
        .map_err(failed)?;
    for curve in curves {
        let style = curve.style;
        chart
            .draw_series(LineSeries::new(curve.points.iter().copied(), style))
            .map_err(failed)?
            .label(&curve.label)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
    }
    chart
        .configure_series_labels()
        .position(emptiest_corner(axes, curves))
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()
        .map_err(failed)?;
    area.present().map_err(failed)?;
    Ok(())
}

/// Where the labels hide the fewest points, the lower right if others are no better.
fn emptiest_corner(axes: Axes, curves: &[Curve]) -> SeriesLabelPosition {
    let along = |(x, y): (f64, f64)| {
        let place = |value: f64, scale| match scale {
            Scale::Linear => value,
            Scale::Logarithmic => value.ln(),
        };
        (place(x, axes.x.1), place(y, axes.y.1))
    };
    let points: Vec<_> = curves
        .iter()
        .flat_map(|curve| curve.points.iter().copied().map(along))
        .collect();
    let middle = |of: fn(&(f64, f64)) -> f64| {
        let least = points.iter().map(of).fold(f64::INFINITY, f64::min);
        let most = points.iter().map(of).fold(f64::NEG_INFINITY, f64::max);
        (least + most) / 2.0
    };
    let (x, y) = (middle(|p| p.0), middle(|p| p.1));
    let corners = [
        (SeriesLabelPosition::LowerRight, true, false),
        (SeriesLabelPosition::UpperRight, true, true),
        (SeriesLabelPosition::UpperLeft, false, true),
        (SeriesLabelPosition::LowerLeft, false, false),
    ];
    let hidden = |&(_, right, upper): &(_, bool, bool)| {
        let inside = |p: &&(f64, f64)| (p.0 >= x) == right && (p.1 >= y) == upper;
        points.iter().filter(inside).count()
    };
    // The first of equals.
    let emptiest = corners.into_iter().min_by_key(hidden);
    emptiest.map_or(SeriesLabelPosition::LowerRight, |corner| corner.0)
}

fn label(value: &f64) -> String {
    match value.abs() {
        size if size >= 1e6 => format!("{value:.0e}"),
        size if size >= 10.0 || size == 0.0 => format!("{value:.0}"),
        _ => {
            let text = format!("{value:.3}");
            text.trim_end_matches('0').trim_end_matches('.').to_string()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chart_is_an_svg_with_its_labels() {
        let file = std::env::temp_dir().join(format!("chart-{}.svg", std::process::id()));
        let curve = Curve {
            label: "p0.9".to_string(),
            points: vec![(1.0, 1e5), (1024.0, 2e6)],
            style: COLORS[0].stroke_width(2),
        };
        chart(&file, "sample", Axes::logarithmic("batch", "us"), &[curve]).unwrap();
        let svg = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        for part in ["<svg", "polyline", "p0.9", "sample"] {
            assert!(svg.contains(part), "{part} is missing in {svg}");
        }
    }

    #[test]
    fn labels_stand_where_no_curve_is() {
        let corner = |points: &[(f64, f64)]| {
            let curve = Curve::main("a", COLORS[0], points.to_vec());
            emptiest_corner(Axes::linear("x", "y"), &[curve])
        };
        let falling = [(0.0, 3.0), (1.0, 1.0), (2.0, 0.5), (3.0, 0.0)];
        assert!(matches!(corner(&falling), SeriesLabelPosition::UpperRight));
        let rising = [(0.0, 0.0), (1.0, 1.0), (2.0, 2.0), (3.0, 3.0)];
        assert!(matches!(corner(&rising), SeriesLabelPosition::LowerRight));
    }

    #[test]
    fn points_come_once_and_in_order() {
        let points = [(8, 3.0), (1, 1.0), (8, 3.0)];
        assert_eq!(ascending(points.into_iter()), [(1.0, 1.0), (8.0, 3.0)]);
    }
}
