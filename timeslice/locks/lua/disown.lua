--[[
A coordinator lets a group go, so that another may take it at once.
ARGV  1 floor  2 coordinator
Reply ok
--]]
-- @include group
begin(true)
if S.owner == ARGV[2] then
  settle_clock()
  set('owner', '')
  set('owner_deadline_ms', 0)
  save()
end
return { 'ok' }
