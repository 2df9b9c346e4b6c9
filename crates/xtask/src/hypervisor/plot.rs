//! A page with plots of a live migration: dirty pages by round, faults by vCPU.

use anyhow::Context;
use plotters::prelude::*;
use serde_json::Value;

const SIZE: (u32, u32) = (720, 360);

/// Returns the page, which contains the plots.
pub fn page(migration: &Value, words: &str) -> anyhow::Result<String> {
    let numbers = |value: &Value| -> Vec<u64> {
        value.as_array().into_iter().flatten().filter_map(Value::as_u64).collect()
    };
    let mut rounds = numbers(&migration["rounds"]);
    let left = migration["left"].as_u64().context("a migration says what was left")?;
    rounds.push(left);
    let faults: Vec<Vec<u64>> =
        migration["faults"].as_array().into_iter().flatten().map(numbers).collect();
    let vcpus = faults.first().map_or(0, Vec::len);
    // Faults of each vCPU in each round.
    let by_vcpu: Vec<Vec<u64>> = (0..vcpus)
        .map(|vcpu| faults.windows(2).map(|two| two[1][vcpu] - two[0][vcpu]).collect())
        .collect();
    let frequency = migration["frequency"].as_u64().unwrap_or(1).max(1);
    let ticks = migration["downtime_ticks"].as_u64().unwrap_or(0);
    let title = "A guest's live migration in place";
    Ok(format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>{title}</title>\
         <style>body{{font:15px/1.5 sans-serif;max-width:46em;margin:2em auto;padding:0 1em}}\
         </style>\
         <h1>{title}</h1><p><code>{words}</code></p>\
         <p>{} pages; {} rounds; {left} pages were left for the downtime of {ticks} ticks \
         ({:.1} ms of the emulator's counter, which is no machine's time).</p>\
         <h2>Pages copied, by round</h2><p>Round 0 is all memory; the last is the downtime's.</p>{}\
         <h2>Stage-2 faults, by vCPU</h2><p>In each round, and while huge pages were \
         recovered.</p>{}",
        migration["pages"],
        rounds.len() - 2,
        ticks as f64 / frequency as f64 * 1e3,
        plot(&[("pages".to_owned(), rounds)], true)?,
        plot(
            &by_vcpu
                .into_iter()
                .enumerate()
                .map(|(vcpu, faults)| (format!("vCPU {vcpu}"), faults))
                .collect::<Vec<_>>(),
            false
        )?,
    ))
}

/// Returns series over rounds, as an SVG: bars for one, lines for several.
fn plot(series: &[(String, Vec<u64>)], bars: bool) -> anyhow::Result<String> {
    let mut svg = String::new();
    let rounds = series.iter().map(|(_, values)| values.len()).max().unwrap_or(0);
    // The first bar is all memory; the scale fits the later ones.
    let skipped = usize::from(bars);
    let most = series.iter().flat_map(|(_, values)| values.iter().skip(skipped)).max();
    let most = most.copied().unwrap_or(0).max(1);
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        area.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&area)
            .margin(12)
            .x_label_area_size(32)
            .y_label_area_size(64)
            .build_cartesian_2d(-0.5..rounds as f64 - 0.5, 0.0..most as f64 * 1.1)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .x_labels(rounds)
            .x_label_formatter(&|round| format!("{round:.0}"))
            .x_desc("round")
            .draw()?;
        for (place, (name, values)) in series.iter().enumerate() {
            let colour = Palette99::pick(place).to_rgba();
            let points =
                values.iter().enumerate().map(|(round, &value)| (round as f64, value as f64));
            if bars {
                chart.draw_series(points.map(|(round, value)| {
                    let height = value.min(most as f64 * 1.1);
                    Rectangle::new([(round - 0.4, 0.0), (round + 0.4, height)], colour.filled())
                }))?;
            } else {
                chart
                    .draw_series(LineSeries::new(points, colour.stroke_width(2)).point_size(3))?
                    .label(name)
                    .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour));
            }
        }
        if !bars {
            chart.configure_series_labels().border_style(BLACK).background_style(WHITE).draw()?;
        }
        area.present()?;
    }
    Ok(svg)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_migration_is_plotted_by_round_and_by_vcpu() {
        let migration = serde_json::json!({
            "frequency": 62_500_000, "pages": 65536, "rounds": [65536, 600, 300], "left": 12,
            "downtime_ticks": 625_000, "faults": [[5, 6], [10, 20], [30, 21], [31, 40]],
        });
        let page = page(&migration, "vcpus=2").unwrap();
        assert_eq!(page.matches("<svg").count(), 2);
        assert!(page.contains("2 rounds; 12 pages were left") && page.contains("10.0 ms"));
        assert!(page.contains("vCPU 1"));
    }
}
