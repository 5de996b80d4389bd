--[[
Stops or resumes granting. The holder keeps what it has; queueing goes on.
ARGV  1 floor  2 '1' pause, '0' resume  3 by whom  4 why, or ''
Reply ok phase
Events GroupPaused, GroupResumed, and what advance and reap emit
--]]
-- @include group waiters gangs residency lease advance
local pause = ARGV[2] == '1'

begin(true)
settle_clock()
if pause and S.paused == '' then
  set('paused', 'paused by ' .. ARGV[3] .. (ARGV[4] == '' and '' or ' (' .. ARGV[4] .. ')'))
  emit('GroupPaused', 'by', ARGV[3], 'reason', ARGV[4])
elseif not pause and S.paused ~= '' then
  set('paused', '')
  emit('GroupResumed', 'by', ARGV[3], 'reason', ARGV[4])
end
reap()
advance()
save()
return { 'ok', S.phase }
