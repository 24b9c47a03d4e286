// Shows the field with the class "filter" of a page, and keeps the rows of its tables that contain all words typed there.
document.addEventListener("DOMContentLoaded", () => {
  const field = document.querySelector("input.filter")
  if (!field) return
  const tables = [...document.querySelectorAll("article table")]
  field.hidden = false
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/)
    for (const table of tables) {
      const rows = [...table.querySelectorAll("tbody tr")]
      for (const row of rows) row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word))
      table.hidden = rows.every(row => row.hidden)
    }
  })
})
